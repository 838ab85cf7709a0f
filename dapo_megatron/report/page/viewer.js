"use strict";

// One completion in full, its tokens coloured by a figure of theirs; or two of one group.
const RolloutViewer = (() => {
  const CHUNK = 400; // tokens of a block that the browser may leave undrawn
  const signed = (text) => text.replace("-", "\u2212");
  const fixed = (value, digits) => value == null ? "–" : signed(value.toFixed(digits));
  const count = new Intl.NumberFormat("en-US");
  const SIGNS = { true: "✓", false: "✗", null: "?" };
  // What would not be seen, or would rearrange what is: controls, zero widths (but joiners), overrides of direction.
  const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

  // Steps of a colour begin at these values; a diverging one has as many on both sides.
  const COLORS = {
    advantage: {
      label: "advantage", help: "How much better than its group: the same for all tokens of a completion",
      steps: [0.05, 0.5, 1, 1.5, 2], diverges: true, legend: ["worse than its group", "better"],
      value: (one) => one.advantage,
      lacks: (one, group) => one.advantage == null ? group.fate === "trained" ? "it was left out of the loss" : `the group was not trained on (${group.fate.replaceAll("_", " ")})` : null,
    },
    logprob: {
      label: "log-prob", help: "The engine's log-prob of the token when it was sampled",
      steps: [0.05, 0.2, 0.5, 1, 1.5, 2.5, 4, 6, 9], legend: ["likely", "unlikely"], write: (step) => `\u2212${step}`,
      value: (one, at) => one.logprob[at] == null ? null : -one.logprob[at] / 1000,
      lacks: (one) => one.logprob.length ? null : "it has no tokens",
    },
    entropy: {
      label: "entropy", help: "Of the policy's distribution at the token, in nats, before the step's first update",
      steps: [0.05, 0.2, 0.5, 0.8, 1.2, 1.6, 2, 2.5, 3], legend: ["sure", "unsure"],
      value: (one, at) => one.entropy[at] == null ? null : one.entropy[at] / 1000,
      lacks: (one, group) => one.entropy ? null : unrecorded(group),
    },
    gap: {
      label: "gap", help: "|engine log-prob − policy log-prob| of the token",
      steps: [1, 3, 10, 30, 100, 300, 1000, 3000, 10000], legend: ["they agree", "they differ"], // of the group's unit
      write: (step, group) => { const gap = step / 10 ** group.gap_decimals; return gap < 0.001 ? signed(gap.toExponential(0)) : String(gap); },
      value: (one, at) => one.gap[at] == null ? null : Math.abs(one.gap[at]),
      lacks: (one, group) => one.gap ? null : unrecorded(group),
    },
    version: {
      label: "weights", help: "The version of the weights that sampled the token", steps: [1, 2, 3, 4, 5, 6, 7, 8, 9],
      legend: ["newest", "older, in versions"],
      value: (one, at) => one.versions.at(-1) - one.versions[at],
      lacks: (one) => one.versions.length && one.versions[0] !== one.versions.at(-1) ? null : `all of it is by version ${one.versions[0] ?? "–"}`,
    },
  };
  const unrecorded = (group) => group.fate === "trained"
    ? "not recorded by token for this group (tracking.inspected_groups)" : "the policy computed none: the group was not trained on";

  function make(dialog, element, host) {
    let blob, group, sides, color = "logprob", special;
    let looked; // what was searched for, if it was
    const bar = element("header", { className: "v-bar" });
    const strip = element("div", { className: "v-strip", role: "group", "aria-label": "Samples of the group" });
    const body = element("div", { className: "v-body" });
    const legend = element("div", { className: "v-colors" });
    const detail = element("p", { className: "v-detail", role: "status" });
    dialog.replaceChildren(bar, strip, legend, body, detail);

    function show(opened, place, sample, beside, pattern = null) {
      const isFirst = !dialog.open;
      looked = pattern;
      blob = opened;
      special = new Set(blob.special);
      group = blob.groups[place];
      sides = [sample, beside].filter((one) => group.completions.some((other) => other.sample === one));
      if (isFirst) dialog.showModal();
      draw(isFirst);
    }

    function bySample(sample) {
      const one = group.completions.find((other) => other.sample === sample);
      one.versions ??= versions(one);
      return one;
    }

    // Of each shown token.
    function versions(one) {
      const all = one.segments.flatMap(([version, num]) => new Array(num).fill(version));
      if (one.cut) all.splice(one.cut[0], one.cut[1]);
      return all;
    }

    function set(next) {
      sides = next;
      host.openAt(group.ticket, sides[0], sides[1] ?? null);
      draw();
    }

    // ---------------------------------------------------------------- around the tokens

    function draw(isFirst = false) {
      const key = isFirst ? null : focused();
      if (sides.every((sample) => COLORS[color].lacks(bySample(sample), group))) color = "logprob";
      drawBar();
      drawStrip();
      drawColors();
      stop();
      body.classList.toggle("v-two", sides.length === 2);
      body.replaceChildren(...(sides.length === 2 ? [about(), ...sides.map(half)] : [about(bySample(sides[0])), half(sides[0])]));
      say(null);
      for (const pane of body.querySelectorAll("div.v-tokens")) reveal(pane);
      body.querySelector("mark")?.scrollIntoView({ block: "nearest" });
      refocus(key);
    }

    const focused = () => dialog.contains(document.activeElement) ? document.activeElement.dataset.key : null;

    // What was drawn anew: who was on a button stays on it, everyone else is at the tokens.
    function refocus(key) {
      const again = key && [...dialog.querySelectorAll("[data-key]")].find((one) => one.dataset.key === key && !one.disabled);
      (again ?? body.querySelector(".v-tokens")).focus({ preventScroll: true });
    }

    function button(label, title, click, properties = {}) {
      const made = element("button", { type: "button", title, ...properties }, label);
      made.dataset.key = properties.id ?? properties["data-color"] ?? title;
      made.addEventListener("click", click);
      return made;
    }

    function drawBar() {
      const one = bySample(sides[0]);
      const other = group.completions.find((two) => two.correct !== one.correct) ?? group.completions.find((two) => two !== one);
      const isTwo = sides.length === 2;
      bar.replaceChildren(
        element("h2", {}, `Ticket ${group.ticket} · sample ${sides.join(" and ")}`),
        element("span", { className: "muted" }, `step ${count.format(group.step)} · ${group.source} · ${group.fate.replaceAll("_", " ")}`),
        element("span", { className: "v-spring" }),
        button("‹", "The one above in the table (k)", () => host.move(-1), { "aria-label": "previous" }),
        button("›", "The one below in the table (j)", () => host.move(1), { "aria-label": "next" }),
        ...(isTwo ? [button("swap", "Left and right", () => set([sides[1], sides[0]]))] : []),
        button(isTwo ? "one alone" : "compare", "Two of the group side by side (c)", () => set(isTwo ? [sides[0]] : [sides[0], other.sample]),
          { disabled: !other, id: "compare", "aria-pressed": String(isTwo) }),
        button("×", "Close (Escape)", () => dialog.close(), { "aria-label": "close", className: "v-close" }),
      );
    }

    function drawStrip() {
      const longest = Math.max(1, ...group.completions.map((one) => one.num_tokens));
      strip.replaceChildren(...group.completions.map((one) => {
        const side = sides.indexOf(one.sample);
        const chip = button("", `sample ${one.sample}: ${one.num_tokens} tokens`, () => set(sides.length === 2 ? (one.sample === sides[0] ? sides : [sides[0], one.sample]) : [one.sample]),
          { className: "v-chip", "aria-pressed": String(side >= 0) });
        chip.dataset.sample = one.sample;
        const length = element("i", { className: "v-length" });
        length.style.width = `${Math.max(2, 100 * one.num_tokens / longest)}%`;
        chip.append(element("b", {}, `${SIGNS[one.correct]} ${one.sample}`), element("span", {}, one.correct == null ? "no grade" : fixed(one.reward, 2)),
          element("span", { className: "muted" }, count.format(one.num_tokens)), length);
        return chip;
      }));
    }

    function drawColors() {
      const lacking = (name) => sides.map((sample) => COLORS[name].lacks(bySample(sample), group)).find(Boolean);
      const choices = Object.entries(COLORS).map(([name, { label, help }]) => {
        const why = sides.every((sample) => COLORS[name].lacks(bySample(sample), group)) ? lacking(name) : null;
        return button(label, why ? `Not there: ${why}` : help, () => { color = name; drawColors(); recolor(); refocus(name); },
          { disabled: Boolean(why), "aria-pressed": String(name === color), "data-color": name });
      });
      const { steps, diverges, legend: ends, write = String } = COLORS[color];
      const boxes = [...(diverges ? [...steps].reverse().map((step) => [`d${steps.indexOf(step) + 1}`, `\u2212${step}`]) : []),
        ["", "0"], ...steps.map((step, at) => [`${diverges ? "u" : "s"}${at + 1}`, write(step, group)])];
      legend.replaceChildren(element("span", { className: "muted" }, "Colour by"), element("span", { className: "v-choices", role: "group", "aria-label": "Colour by" }, ...choices),
        element("span", { className: "v-legend", title: COLORS[color].help }, element("span", { className: "muted" }, ends[0]),
          ...boxes.map(([name, text]) => element("span", { className: `v-box ${name}`, title: text }, diverges || steps.length < 10 ? text : "")), element("span", { className: "muted" }, ends[1])));
    }

    // Prompt, truth, and, of one alone, how it was graded.
    function about(one) {
      const side = element("aside", { className: "v-about" });
      if (one) side.append(facts(one));
      side.append(text("Prompt", group.prompt), text("Truth", group.truth || "none: the grader needs none"));
      if (one) side.append(grade(one, true));
      return side;
    }

    function text(title, content) {
      return element("details", { className: "v-text", open: true }, element("summary", {}, title), element("pre", { tabIndex: 0 }, ...marked(content)));
    }

    function facts(one) {
      const list = element("dl", { className: "v-facts" });
      const add = (name, value) => list.append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
      add("graded", one.score == null ? "? no grade" : one.correct ? "✓ right" : one.parsed ? "✗ wrong" : "✗ no answer found");
      add("reward", fixed(one.reward, 3));
      add("advantage", fixed(one.advantage, 3));
      add("tokens", count.format(one.num_tokens));
      add("finish", one.finish);
      add("weights", [...new Set(one.segments.map(([version]) => version))].join(", ") || "–");
      if (one.pred) add("answer read", seen(one.pred));
      add("here because", one.why);
      return list;
    }

    function grade(one, open) {
      const list = element("dl", { className: "v-grade" });
      for (const [name, said] of one.grade) list.append(element("dt", {}, name), element("dd", {}, seen(said)));
      return element("details", { open }, element("summary", {}, "How it was graded"), list);
    }

    function half(sample) {
      const one = bySample(sample);
      const part = element("div", { className: "v-half", role: "region", "aria-label": `sample ${sample}` });
      if (sides.length === 2) {
        part.append(element("h3", {}, `${SIGNS[one.correct]} sample ${sample}`,
          element("span", { className: "muted" }, ` reward ${fixed(one.reward, 2)} · advantage ${fixed(one.advantage, 2)} · ${count.format(one.num_tokens)} tokens · ${one.finish}`)), grade(one, false));
      }
      part.append(one.tokens ? tokens(one) : element("pre", { className: "v-tokens v-whole", tabIndex: 0 }, ...marked(one.text)));
      return part;
    }

    // ---------------------------------------------------------------- tokens

    const seen = (content) => String(content).replace(HIDDEN, (letter) => `\u27e8U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`);

    // What was searched for stands in marks.
    const marked = (content) => RolloutSearch.parts(content, looked).map((part, at) => at % 2 ? element("mark", {}, seen(part)) : seen(part));

    function tokens(one) {
      const pane = element("div", { className: "v-tokens", tabIndex: 0, role: "group", "aria-label": "Tokens: arrow keys move, n and p go to the next and the previous deep colour" });
      pane.spans = [];
      pane.completion = one;
      pane.at = null;
      pane.found = RolloutSearch.tokensWith(blob, one, looked);
      if (!one.tokens.length) pane.append(element("p", { className: "muted" }, "No tokens."));
      let at = 0;
      // In parts: the first screen is there at once, and a long one never holds up the page.
      const work = () => {
        const until = performance.now() + 12;
        while (at < one.tokens.length && performance.now() < until) at = block(pane, one, at);
        reveal(pane);
        if (at < one.tokens.length) pane.timer = setTimeout(work);
        else pane.dataset.whole = "true";
      };
      work();
      pane.addEventListener("pointerover", (event) => { if (event.target.dataset.at) say(pane, Number(event.target.dataset.at)); });
      pane.addEventListener("pointerleave", () => say(pane, pane.at));
      pane.addEventListener("click", (event) => { if (event.target.dataset.at) choose(pane, Number(event.target.dataset.at)); });
      pane.addEventListener("keydown", (event) => keys(pane, event));
      pane.addEventListener("focus", () => say(pane, pane.at));
      return pane;
    }

    // The first of what was searched for comes into sight, once it is there.
    function reveal(pane) {
      const [first] = pane.found;
      if (pane.at == null && pane.spans[first] && pane.isConnected) choose(pane, first);
    }

    // One block of tokens, to the end of a line if one comes soon; the place behind it.
    function block(pane, one, first) {
      const made = element("div", { className: "v-block" });
      const paint = painter(one);
      let at = first;
      for (; at < one.tokens.length; at++) {
        if (one.cut && at === one.cut[0] && at > first) break;
        const num = at - first;
        if (num >= 4 * CHUNK || (num >= CHUNK && pane.spans[at - 1].textContent.endsWith("\n"))) break;
        const span = document.createElement("span");
        const piece = blob.pieces[one.tokens[at]];
        span.dataset.at = at;
        span.look = look(piece, one.tokens[at]) + (pane.found.has(at) ? " v-found" : "");
        span.className = `${span.look} ${paint(at)}`;
        span.textContent = seen(piece);
        pane.spans.push(span);
        made.append(span);
      }
      if (one.cut && first === one.cut[0]) pane.append(element("p", { className: "v-cut" }, `${count.format(one.cut[1])} tokens are left out here`));
      pane.append(made);
      return at;
    }

    function look(piece, token) {
      if (special.has(token)) return "t v-special";
      if (piece === "") return "t v-part";
      if (piece.includes("\n")) return "t v-newline";
      return /^\s{2,}$|\t/.test(piece) ? "t v-blank" : "t";
    }

    // From the place of a token to the class of its colour.
    function painter(one) {
      const { steps, diverges, value, lacks } = COLORS[color];
      if (lacks(one, group)) return () => "";
      return (at) => {
        const found = value(one, at);
        if (found == null) return "v-unknown";
        const size = Math.abs(found);
        let step = 0;
        while (step < steps.length && size >= steps[step]) step++;
        return step === 0 ? "" : (diverges ? found < 0 ? "d" : "u" : "s") + step;
      };
    }

    function recolor() {
      for (const pane of body.querySelectorAll("div.v-tokens")) {
        const paint = painter(pane.completion);
        pane.spans.forEach((span, at) => { span.className = `${span.look} ${paint(at)}${at === pane.at ? " v-at" : ""}`; });
        say(pane, pane.at);
      }
    }

    // Tokens that are still to come are wanted no more.
    function stop() {
      for (const pane of body.querySelectorAll("div.v-tokens")) clearTimeout(pane.timer);
    }

    function choose(pane, at) {
      pane.spans[pane.at]?.classList.remove("v-at");
      pane.at = at;
      pane.spans[at].classList.add("v-at");
      pane.spans[at].scrollIntoView({ block: "nearest" });
      say(pane, at);
    }

    function keys(pane, event) {
      const last = pane.spans.length - 1;
      if (last < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
      const from = pane.at ?? -1;
      const next = {
        ArrowRight: () => from + 1, ArrowLeft: () => from - 1, Home: () => 0, End: () => last,
        ArrowDown: () => line(pane, from, 1), ArrowUp: () => line(pane, from, -1),
        n: () => deep(pane, from, 1), p: () => deep(pane, from, -1),
      }[event.key];
      if (!next) return;
      event.preventDefault();
      choose(pane, Math.min(Math.max(next(), 0), last));
    }

    // The token below or above.
    function line(pane, from, by) {
      if (from < 0) return 0;
      const { top, left } = pane.spans[from].getBoundingClientRect();
      let best = from, row = null;
      for (let at = from + by; pane.spans[at]; at += by) {
        const rect = pane.spans[at].getBoundingClientRect();
        if (Math.abs(rect.top - top) < 4) continue;
        row ??= rect.top;
        if (Math.abs(rect.top - row) > 4) break;
        if (best === from || Math.abs(rect.left - left) < Math.abs(pane.spans[best].getBoundingClientRect().left - left)) best = at;
      }
      return best;
    }

    // The next token whose colour is in the upper half of the scale.
    function deep(pane, from, by) {
      for (let at = from + by; pane.spans[at]; at += by) if (/ [sud][5-9]/.test(pane.spans[at].className)) return at;
      return from;
    }

    // The figures of a token, below.
    function say(pane, at = null) {
      if (pane == null || at == null) {
        detail.replaceChildren(element("span", { className: "muted" }, "Point at a token, or move with the arrow keys, for its figures; n and p go to the next and the previous deep colour."));
        return;
      }
      const one = pane.completion;
      const place = one.cut && at >= one.cut[0] ? at + one.cut[1] : at;
      const part = (name, value) => element("span", {}, element("span", { className: "muted" }, `${name} `), value);
      const logprob = one.logprob[at] == null ? null : one.logprob[at] / 1000;
      const gap = one.gap?.[at] == null ? null : one.gap[at] / 10 ** group.gap_decimals;
      detail.replaceChildren(
        element("code", {}, JSON.stringify(seen(blob.pieces[one.tokens[at]]))), part("id", String(blob.ids[one.tokens[at]])),
        part("token", `${count.format(place + 1)} of ${count.format(one.num_tokens)}`),
        part("log-prob", logprob == null ? "–" : `${fixed(logprob, 3)} (p ${Math.exp(logprob).toPrecision(3)})`),
        ...(gap == null ? [] : [part("policy", fixed(logprob - gap, 3)), part("gap", fixed(Math.abs(gap), group.gap_decimals))]),
        ...(one.entropy?.[at] == null ? [] : [part("entropy", fixed(one.entropy[at] / 1000, 3))]),
        ...(one.advantage == null ? [] : [part("advantage", fixed(one.advantage, 3))]),
        part("weights", `version ${one.versions[at] ?? "–"}`));
    }

    // Wherever the focus is: a click between the parts takes it from all of them.
    document.addEventListener("keydown", (event) => {
      if (!dialog.open || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "j") host.move(1);
      if (event.key === "k") host.move(-1);
      if (event.key === "c") bar.querySelector("#compare").click();
    });
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });

    return {
      show,
      clear() {
        stop();
        body.replaceChildren();
      },
      color(next) {
        if (next in COLORS) color = next;
        return color;
      },
    };
  }

  return { make };
})();
