"use strict";

// Shows one completion in full, its tokens coloured by one of their values. Texts of the run become
// text nodes only.
const RolloutViewer = (() => {
  const SIGNS = { true: "✓", false: "✗", null: "?" };

  function element(tag, properties, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  }

  function make(dialog) {
    const find = (selector) => dialog.querySelector(selector);
    const pane = find(".v-tokens"), radios = [...dialog.querySelectorAll("[name=color]")];
    let group, one, spans, chosen;

    // Values of the tokens by name, and the size at which a colour is deepest.
    const sizes = {
      logprob: { deepest: 9, of: (value) => -value },
      entropy: { deepest: 3, of: (value) => value },
      gap: { deepest: 1, of: (value) => Math.abs(value) },
      version: { deepest: 1, of: (value) => one.version.at(-1) - value },
    };

    function show(row, opened) {
      group = opened;
      one = group.completions.find((other) => String(other.sample) === row.dataset.sample);
      const heads = [...row.closest("table").tHead.querySelectorAll("button")];
      const cells = heads.map((head, at) => [head.textContent, row.cells[at].textContent]);
      find("h2").textContent = `Ticket ${row.cells[0].dataset.value} · sample ${one.sample}`;
      find(".v-facts").replaceChildren(...cells.slice(1).map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))));
      find(".v-samples").replaceChildren(...group.completions.map((other) => {
        const link = element("a", { href: `#rollout-${row.dataset.blob}-${other.sample}`, title: `${other.num_tokens} tokens` }, `${SIGNS[other.correct]} ${other.sample}`);
        if (other === one) link.ariaCurrent = "true";
        return link;
      }));
      [group.prompt, group.truth, one.answer].forEach((text, at) => { dialog.querySelectorAll(".v-text pre")[at].textContent = text; });
      sizes.gap.deepest = group.largest_gap || 1;
      sizes.version.deepest = Math.max(1, one.version.at(-1) - one.version[0]);
      drawTokens();
      for (const radio of radios) radio.disabled = !one[radio.value] || !one.tokens;
      if (radios.some((radio) => radio.checked && radio.disabled)) radios[0].checked = true;
      paint();
      if (!dialog.open) dialog.showModal();
      pane.scrollTop = 0;
      pane.focus({ preventScroll: true });
    }

    function drawTokens() {
      const special = new Set(group.special);
      chosen = -1;
      say(-1);
      spans = (one.tokens ?? []).map((token, at) => {
        const piece = group.pieces[token];
        const kind = special.has(token) ? "t v-special" : piece === "" ? "t v-part" : piece.includes("\n") ? "t v-newline" : "t";
        const span = element("span", { className: kind }, piece);
        span.dataset.at = at;
        return span;
      });
      pane.replaceChildren(...(one.tokens ? spans : [one.text]));
      if (one.cut && one.tokens) spans[one.cut[0]].before(element("p", { className: "v-cut" }, `${one.cut[1].toLocaleString("en-US")} tokens are left out here`));
    }

    function paint() {
      const name = color(), { deepest, of } = sizes[name];
      spans.forEach((span, at) => {
        const value = one[name]?.[at];
        span.classList.toggle("v-unknown", value == null);
        // By the square root: small values differ visibly, too.
        span.style.setProperty("--depth", `${value == null ? 0 : (48 * Math.sqrt(Math.min(1, Math.max(0, of(value)) / deepest))).toFixed(1)}%`);
      });
      find("output").textContent = `${name === "logprob" ? "\u2212" : ""}${deepest}`;
    }

    function color(next) {
      const radio = radios.find((other) => other.value === next);
      if (radio) radio.checked = true;
      return radios.find((other) => other.checked).value;
    }

    function choose(at) {
      if (!spans[at]) return;
      spans[chosen]?.classList.remove("v-at");
      chosen = at;
      spans[at].classList.add("v-at");
      spans[at].scrollIntoView({ block: "nearest" });
      say(at);
    }

    // The values of a token, below.
    function say(at) {
      const token = one.tokens?.[at];
      const text = (value) => String(value ?? "–").replace("-", "\u2212");
      const place = one.cut && at >= one.cut[0] ? at + one.cut[1] : at;
      find(".v-detail").textContent = token === undefined ? "Point at a token, or move with the arrow keys, for its values."
        : [JSON.stringify(group.pieces[token]), `id ${group.ids[token]}`, `token ${place + 1} of ${one.num_tokens}`,
          `log-prob ${text(one.logprob[at])}`, `entropy ${text(one.entropy?.[at])}`, `gap ${text(one.gap?.[at])}`,
          `weights version ${text(one.version[at])}`].join(" · ");
    }

    // The next token in a deep colour.
    function deep(by) {
      let at = chosen + by;
      while (spans[at] && parseFloat(spans[at].style.getPropertyValue("--depth")) < 24) at += by;
      return at;
    }

    dialog.addEventListener("change", paint);
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    pane.addEventListener("pointerover", (event) => say(Number(event.target.dataset.at ?? chosen)));
    pane.addEventListener("click", (event) => choose(Number(event.target.dataset.at)));
    pane.addEventListener("keydown", (event) => {
      const next = { ArrowRight: () => chosen + 1, ArrowLeft: () => chosen - 1, n: () => deep(1), p: () => deep(-1) }[event.key];
      if (!next || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      choose(next());
    });
    return { show, color };
  }

  return { make };
})();
