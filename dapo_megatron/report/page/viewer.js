"use strict";

// Makes the viewer of completions, with tokens colored by a value. Returns the function that shows
// the completion of a row. Texts of the run are only inserted as text nodes, never as HTML.
function mountViewer(dialog) {
  const SIGNS = { true: "✓", false: "✗", null: "?" };
  const find = (selector) => dialog.querySelector(selector);
  const pane = find(".v-tokens"), radios = [...dialog.querySelectorAll("[name=color]")];
  let group, completion, spans, current;

  // Value name -> the value's size, and the size at which the color is deepest.
  const sizes = {
    logprob: { deepest: 9, of: (value) => -value },
    entropy: { deepest: 3, of: (value) => value },
    gap: { deepest: 1, of: (value) => Math.abs(value) },
    version: { deepest: 1, of: (value) => newest() - value },
  };

  const versions = () => completion.version.filter((version) => version !== null);
  const newest = () => versions().at(-1) ?? 0;
  const isObserved = (at) => completion.observed.some(([start, end]) => start <= at && at < end);

  function element(tag, properties, ...children) {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  }

  function show(row, opened) {
    group = opened;
    completion = group.completions.find((other) => String(other.sample) === row.dataset.sample);
    const heads = [...row.closest("table").tHead.querySelectorAll("button")];
    find("h2").textContent = `Ticket ${row.cells[0].dataset.value} · sample ${completion.sample}`;
    find(".v-facts").replaceChildren(...heads.slice(1).map((head, at) => element("div", {}, element("dt", {}, head.textContent), element("dd", {}, row.cells[at + 1].textContent))));
    find(".v-samples").replaceChildren(...group.completions.map((other) => {
      const link = element("a", { href: `#rollout-${row.dataset.group}-${other.sample}`, title: `${other.num_tokens} tokens` }, `${SIGNS[other.correct]} ${other.sample}`);
      if (other === completion) link.ariaCurrent = "true";
      return link;
    }));
    [group.prompt, group.truth, completion.answer].forEach((text, at) => { dialog.querySelectorAll(".v-text pre")[at].textContent = text; });
    sizes.gap.deepest = group.largest_gap || 1;
    sizes.version.deepest = Math.max(1, newest() - (versions()[0] ?? 0));
    drawTokens();
    for (const radio of radios) radio.disabled = !completion[radio.value] || !completion.tokens;
    if (radios.some((radio) => radio.checked && radio.disabled)) radios[0].checked = true;
    paint();
    if (!dialog.open) dialog.showModal();
    pane.scrollTop = 0;
    pane.focus({ preventScroll: true });
  }

  function drawTokens() {
    const special = new Set(group.special);
    current = -1;
    describe(-1);
    spans = (completion.tokens ?? []).map((token, at) => {
      const piece = group.pieces[token];
      const kind = special.has(token) ? "t v-special" : piece === "" ? "t v-part" : piece.includes("\n") ? "t v-newline" : "t";
      const span = element("span", { className: kind }, piece);
      span.dataset.at = at;
      span.classList.toggle("v-observed", isObserved(at));
      return span;
    });
    pane.replaceChildren(...(completion.tokens ? spans : [completion.text]));
  }

  function paint() {
    const name = radios.find((radio) => radio.checked).value, { deepest, of } = sizes[name];
    spans.forEach((span, at) => {
      const value = completion[name]?.[at];
      span.classList.toggle("v-unknown", value == null);
      // The square root makes small differences visible.
      span.style.setProperty("--depth", `${value == null ? 0 : (48 * Math.sqrt(Math.min(1, Math.max(0, of(value)) / deepest))).toFixed(1)}%`);
    });
    find("output").textContent = `${name === "logprob" ? "\u2212" : ""}${deepest}`;
  }

  function choose(at) {
    if (!spans[at]) return;
    spans[current]?.classList.remove("v-at");
    current = at;
    spans[at].classList.add("v-at");
    spans[at].scrollIntoView({ block: "nearest" });
    describe(at);
  }

  // Shows the values of token `at` below the text.
  function describe(at) {
    const token = completion.tokens?.[at];
    const text = (value) => String(value ?? "–").replace("-", "\u2212");
    find(".v-detail").textContent = token === undefined ? "Point at a token, or move with the arrow keys, to see its values."
      : [JSON.stringify(group.pieces[token]), `id ${group.ids[token]}`, `token ${at + 1} of ${completion.num_tokens}`,
        `log-prob ${text(completion.logprob[at])}`, `entropy ${text(completion.entropy?.[at])}`, `gap ${text(completion.gap?.[at])}`,
        isObserved(at) ? "written by the environment" : `weights version ${text(completion.version[at])}`].join(" · ");
  }

  dialog.addEventListener("change", paint);
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  pane.addEventListener("pointerover", (event) => describe(Number(event.target.dataset.at ?? current)));
  pane.addEventListener("click", (event) => choose(Number(event.target.dataset.at)));
  pane.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(current + by);
  });
  return show;
}
