"use strict";

const Rollouts = (() => {
  function mount() {
    return { update() {}, theme() {} };
  }
  return { mount };
})();
