"use strict";

// What the reader chooses: run, smoothing, the paper's curves, theme; and what is drawn when.
(() => {
  const KEY = `dapo_megatron report ${location.pathname}`;
  const $ = (id) => document.getElementById(id);
  const state = { run: 0, smoothing: 0, paper: "off", hidden: [], mark: null, theme: null };
  const charts = new Map(); // element -> {id, figures: of all runs or of each, zoom: kept until it is drawn, isNear}
  const waiting = new Set(); // elements to be drawn
  let data, rollouts;

  // ---------------------------------------------------------------- data

  // JSON of a script element: base64 of gzip.
  async function unpack(element) {
    const text = atob(element.textContent);
    const bytes = new Uint8Array(text.length); // Uint8Array.from is many times slower
    for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  }

  const openBlob = (id) => unpack($(`blob-${id}`));

  // ---------------------------------------------------------------- what was chosen, over a reload

  function remember() {
    const kept = { ...state, mark: null, scroll: window.scrollY, focus: document.activeElement.id, rollouts: rollouts.save(), zooms: {}, open: {} };
    for (const [element, { id, zoom }] of charts) kept.zooms[id] = element.wholeRange ? Figures.zoom(element) : zoom;
    for (const one of document.querySelectorAll("details[id]")) kept.open[one.id] = one.open;
    try { sessionStorage.setItem(KEY, JSON.stringify(kept)); } catch { /* a private window */ }
  }

  function recall() {
    try { return JSON.parse(sessionStorage.getItem(KEY)) ?? {}; } catch { return {}; }
  }

  // ---------------------------------------------------------------- drawing

  // A chart is drawn when it is scrolled near, and drawn again only while it is; one in a frame, so
  // that scrolling goes on in between.
  const visible = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      charts.get(target).isNear = isIntersecting;
      if (isIntersecting) soon(target);
    }
  }, { rootMargin: "400px" });

  function soon(element) {
    if (element.dataset.drawn === "true") return;
    if (!waiting.size) requestAnimationFrame(drawNext);
    waiting.add(element);
  }

  function drawNext() {
    const [element] = [...waiting].filter((one) => charts.get(one).isNear);
    if (element) drawn(element);
    else waiting.clear();
    if (waiting.size) requestAnimationFrame(drawNext);
  }

  function drawn(element) {
    const entry = charts.get(element);
    waiting.delete(element);
    const marked = state.mark?.chart === entry.id ? state.mark.steps : null;
    Figures.draw(element, entry.figures[state.run] ?? entry.figures[0], data.template, state, marked);
    if (entry.zoom) Plotly.relayout(element, entry.zoom);
    entry.zoom = null;
  }

  function redraw() {
    for (const [element, { isNear }] of charts) {
      element.dataset.drawn = "false";
      if (isNear) soon(element);
    }
  }

  // Paper is light, and nobody scrolls it.
  function print(isPrinting) {
    const kept = document.documentElement.dataset;
    if (isPrinting) kept.theme = "light";
    else if (state.theme) kept.theme = state.theme;
    else delete kept.theme;
    for (const element of charts.keys()) {
      if (!element.checkVisibility()) continue;
      drawn(element);
      Plotly.relayout(element, isPrinting ? { width: 640 } : { width: null, autosize: true });
    }
  }

  function isDark() {
    return state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  function applyTheme() {
    if (state.theme) document.documentElement.dataset.theme = state.theme;
    redraw();
  }

  function choose(run) {
    state.run = run;
    state.mark = null;
    for (const element of document.querySelectorAll("[data-run]")) element.hidden = Number(element.dataset.run) !== run;
    redraw();
    rollouts.update(data.runs[run]);
  }

  // Hide the runs of a look in the charts that show all, or show them again.
  function toggle(look) {
    state.hidden = state.hidden.includes(look) ? state.hidden.filter((one) => one !== look) : [...state.hidden, look];
    show();
    redraw();
  }

  function see(finding) {
    const { chart, steps } = data.runs[state.run].findings[finding];
    state.mark = { chart, steps };
    const card = $(`chart-${chart}`);
    for (const one of document.querySelectorAll(".marked")) one.classList.remove("marked");
    card.classList.add("marked");
    card.scrollIntoView({ block: "center" });
    card.focus({ preventScroll: true });
    redraw();
    drawn(card.querySelector("[data-chart]"));
  }

  // ---------------------------------------------------------------- controls

  function listen() {
    $("theme").addEventListener("click", () => { state.theme = isDark() ? "light" : "dark"; applyTheme(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
    $("run")?.addEventListener("change", (event) => choose(Number(event.target.value)));
    $("smoothing").addEventListener("input", (event) => { state.smoothing = Number(event.target.value); show(); redraw(); });
    $("paper").addEventListener("change", (event) => { state.paper = event.target.value; show(); redraw(); });
    document.addEventListener("click", (event) => {
      const button = event.target.closest("[data-see]");
      if (button) see(Number(button.dataset.see));
      const chip = event.target.closest("[data-chip]");
      if (chip) toggle(Number(chip.dataset.chip));
    });
    window.addEventListener("pagehide", remember);
    window.addEventListener("beforeprint", () => print(true));
    window.addEventListener("afterprint", () => print(false));
    const sections = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        const link = document.querySelector(`nav a[href="#${target.id}"]`);
        if (isIntersecting) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
      }
    }, { rootMargin: "-30% 0px -69% 0px" });
    for (const section of document.querySelectorAll("main > section")) sections.observe(section);
  }

  // The controls say what the state is.
  function show() {
    $("smoothing").value = state.smoothing;
    $("smoothing-value").textContent = state.smoothing.toFixed(2);
    $("paper").value = state.paper;
    if ($("run")) $("run").value = state.run;
    for (const chip of document.querySelectorAll("[data-chip]")) chip.setAttribute("aria-pressed", !state.hidden.includes(Number(chip.dataset.chip)));
    for (const row of document.querySelectorAll("[data-look]")) row.hidden = state.hidden.includes(Number(row.dataset.look));
  }

  // ---------------------------------------------------------------- start

  async function start() {
    data = await unpack($("data"));
    const kept = recall();
    state.smoothing = kept.smoothing ?? Number($("smoothing").value);
    state.paper = kept.paper ?? "off";
    state.theme = kept.theme ?? null;
    state.hidden = kept.hidden ?? [];
    state.run = data.runs[kept.run] ? kept.run : 0;
    if (state.theme) document.documentElement.dataset.theme = state.theme;
    show();
    rollouts = Rollouts.mount($("rollouts-view"), data.runs[state.run], openBlob);
    if (state.run) choose(state.run);
    for (const [id, figures] of Object.entries({ ...data.charts, ...data.timelines })) {
      const element = document.querySelector(`[data-chart="${id}"]`);
      charts.set(element, { id, figures, zoom: kept.zooms?.[id] ?? null, isNear: false });
      visible.observe(element);
    }
    if (kept.rollouts) rollouts.restore(kept.rollouts);
    for (const [id, isOpen] of Object.entries(kept.open ?? {})) if ($(id)) $(id).open = isOpen;
    listen();
    if (kept.focus) $(kept.focus)?.focus({ preventScroll: true });
    if (kept.scroll) window.scrollTo(0, kept.scroll);
    if (data.refresh_seconds) reloadAfter(data.refresh_seconds);
    document.body.dataset.ready = "true";
  }

  // A file cannot ask whether it has changed: it is loaded again in any case, but not under the
  // hands of a reader.
  function reloadAfter(seconds) {
    let touched = 0;
    for (const kind of ["pointermove", "pointerdown", "wheel", "keydown"]) {
      addEventListener(kind, () => { touched = performance.now(); }, { passive: true, capture: true });
    }
    const still = Math.min(3000, 1000 * seconds);
    const attempt = () => {
      const rest = touched + still - performance.now();
      if (touched && rest > 0) setTimeout(attempt, rest);
      else location.reload();
    };
    setTimeout(attempt, 1000 * seconds);
  }

  start();
})();
