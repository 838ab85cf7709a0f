"use strict";

// Controls of the page (run, smoothing, paper curves, theme), and lazy drawing of the charts.
(() => {
  const KEY = `dapo_megatron report ${location.pathname}`;
  const CONFIG = { displayModeBar: false, responsive: true };
  const $ = (id) => document.getElementById(id);
  const state = { run: 0, smoothing: 0, paper: false, hidden: [], theme: null };
  const charts = new Map(); // element -> {id, figures: one for all runs or one per run, zoom}
  let data;

  // ---------------------------------------------------------------- data

  // Unpacks the JSON of a script element (base64 of gzip).
  async function unpack(element) {
    const text = atob(element.textContent);
    const bytes = new Uint8Array(text.length); // Uint8Array.from is many times slower
    for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  }

  // ---------------------------------------------------------------- state over a reload

  const zoomOf = ({ xaxis }) => (xaxis.autorange ? null : xaxis.range);

  function remember() {
    const kept = { ...state, scroll: window.scrollY, focus: document.activeElement.id, rollouts: Rollouts.save(), zooms: {}, open: {} };
    for (const [element, { id, zoom }] of charts) kept.zooms[id] = element.layout ? zoomOf(element.layout) : zoom;
    for (const details of document.querySelectorAll("details[id]")) kept.open[details.id] = details.open;
    try { sessionStorage.setItem(KEY, JSON.stringify(kept)); } catch { /* a private window */ }
  }

  function recall() {
    try { return JSON.parse(sessionStorage.getItem(KEY)) ?? {}; } catch { return {}; }
  }

  // ---------------------------------------------------------------- drawing

  // Charts are drawn when they are near the visible part of the page.
  const near = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) if (isIntersecting) draw(target);
  }, { rootMargin: "400px" });

  function draw(element) {
    if (element.dataset.drawn === "true") return;
    const entry = charts.get(element);
    const figure = entry.figures[state.run] ?? entry.figures[0];
    const shown = figure.data.filter(({ meta }) => !state.hidden.includes(meta?.look)).flatMap(chosen);
    const template = data.templates[isDark() ? "dark" : "light"];
    Plotly.react(element, shown, { ...figure.layout, template, uirevision: state.run }, CONFIG);
    if (entry.zoom) Plotly.relayout(element, { "xaxis.range": entry.zoom });
    entry.zoom = null;
    element.dataset.drawn = "true";
  }

  // Returns the traces to draw for a trace: curves of the paper only if enabled, lines also smoothed.
  function chosen(trace) {
    if (trace.meta?.paper) return [{ ...trace, visible: state.paper }];
    if (!state.smoothing || trace.mode !== "lines" || trace.stackgroup) return [trace];
    return [{ ...trace, opacity: 0.28, showlegend: false }, { ...trace, y: average(trace.y, state.smoothing), hoverinfo: "skip" }];
  }

  // Exponential moving average, normalized so that it is not biased at the start.
  function average(values, weight) {
    let sum = 0, norm = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  }

  function redraw() {
    near.disconnect();
    for (const element of charts.keys()) {
      element.dataset.drawn = "false";
      near.observe(element);
    }
  }

  function isDark() {
    const theme = document.documentElement.dataset.theme;
    return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  function setTheme(theme) {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    redraw();
  }

  // Printing uses the light theme, and needs all visible charts drawn.
  function print() {
    setTheme("light");
    for (const element of charts.keys()) if (element.checkVisibility()) draw(element);
  }

  // ---------------------------------------------------------------- controls

  function chooseRun(run) {
    state.run = run;
    for (const element of document.querySelectorAll("[data-run]")) element.hidden = Number(element.dataset.run) !== run;
    redraw();
  }

  function listen() {
    $("theme").addEventListener("click", () => { state.theme = isDark() ? "light" : "dark"; setTheme(state.theme); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    $("run")?.addEventListener("change", (event) => chooseRun(Number(event.target.value)));
    $("smoothing").addEventListener("change", (event) => { state.smoothing = Number(event.target.value); redraw(); });
    $("paper").addEventListener("change", (event) => { state.paper = event.target.checked; redraw(); });
    for (const chip of document.querySelectorAll("[data-chip]")) {
      chip.addEventListener("change", () => {
        state.hidden = [...document.querySelectorAll("[data-chip]:not(:checked)")].map((box) => Number(box.dataset.chip));
        redraw();
      });
    }
    addEventListener("pagehide", remember);
    addEventListener("beforeprint", print);
    addEventListener("afterprint", () => setTheme(state.theme));
  }

  // ---------------------------------------------------------------- start

  async function start() {
    data = await unpack($("data"));
    const kept = recall();
    state.smoothing = Number($("smoothing").value);
    for (const name of Object.keys(state)) state[name] = kept[name] ?? state[name];
    if (!data.runs[state.run]) state.run = 0;
    $("smoothing").value = state.smoothing;
    $("paper").checked = state.paper;
    if ($("run")) $("run").value = state.run;
    for (const chip of document.querySelectorAll("[data-chip]")) chip.checked = !state.hidden.includes(Number(chip.dataset.chip));
    Rollouts.mount((id) => unpack($(`blob-${id}`)), kept.rollouts);
    for (const [id, figures] of Object.entries({ ...data.charts, ...data.timelines })) {
      charts.set(document.querySelector(`[data-chart="${id}"]`), { id, figures, zoom: kept.zooms?.[id] });
    }
    setTheme(state.theme);
    if (state.run) chooseRun(state.run);
    for (const [id, isOpen] of Object.entries(kept.open ?? {})) if ($(id)) $(id).open = isOpen;
    listen();
    if (kept.focus) $(kept.focus)?.focus({ preventScroll: true });
    if (kept.scroll) window.scrollTo(0, kept.scroll);
    if (data.refresh_seconds) reloadAfter(data.refresh_seconds);
    document.body.dataset.ready = "true";
  }

  // Reloads the page after `seconds`, because a file cannot check whether it has changed. Waits while
  // the reader uses it.
  function reloadAfter(seconds) {
    let touched = -Infinity;
    for (const kind of ["pointermove", "pointerdown", "wheel", "keydown"]) {
      addEventListener(kind, () => { touched = performance.now(); }, { passive: true, capture: true });
    }
    const attempt = () => {
      const rest = touched + Math.min(3000, 1000 * seconds) - performance.now();
      if (rest > 0) setTimeout(attempt, rest);
      else location.reload();
    };
    setTimeout(attempt, 1000 * seconds);
  }

  start();
})();
