"use strict";

const Timeline = (() => {
  function mount() {
    return { update() {}, theme() {} };
  }
  return { mount };
})();
