"use strict";

// What the reader chooses: run, smoothing, the paper's curves, theme; and what is drawn when.
const App = (() => {
  const KEY = `dapo_megatron report ${location.pathname}`;
  const $ = (id) => document.getElementById(id);
  const state = { run: 0, smoothing: 0, paper: "off", hidden: [], mark: null, theme: null };
  const charts = new Map(); // element -> {chart, handle: {update} | null, isNear, isStale}
  const parts = {}; // name -> what its mount returned
  let data;

  // ---------------------------------------------------------------- data

  // JSON of a script element: base64 of gzip.
  async function unpack(element) {
    const text = atob(element.textContent);
    const bytes = Uint8Array.from(text, (one) => one.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  }

  const openBlob = (id) => unpack($(`blob-${id}`));

  // ---------------------------------------------------------------- what was chosen, over a reload

  function remember() {
    const kept = { ...state, mark: null, scroll: window.scrollY, parts: {} };
    for (const [name, part] of Object.entries(parts)) kept.parts[name] = part.save?.() ?? null;
    try { sessionStorage.setItem(KEY, JSON.stringify(kept)); } catch { /* a private window */ }
  }

  function recall() {
    try { return JSON.parse(sessionStorage.getItem(KEY)) ?? {}; } catch { return {}; }
  }

  // ---------------------------------------------------------------- drawing

  // A chart is drawn when it is scrolled near, and drawn again only while it is.
  const visible = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      charts.get(target).isNear = isIntersecting;
      if (isIntersecting) drawn(target);
    }
  }, { rootMargin: "400px" });

  function drawn(element) {
    const entry = charts.get(element);
    if (!entry.handle) entry.handle = Charts.draw(element, entry.chart, data, state);
    else if (entry.isStale) entry.handle.update(state);
    entry.isStale = false;
  }

  function redraw(which = () => true) {
    for (const [element, entry] of charts) {
      if (!entry.handle || !which(entry.chart)) continue;
      entry.isStale = true;
      if (entry.isNear) drawn(element);
    }
  }

  function isDark() {
    return state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  function applyTheme() {
    if (state.theme) document.documentElement.dataset.theme = state.theme;
    redraw();
    for (const part of Object.values(parts)) part.theme(isDark());
  }

  function choose(run) {
    state.run = run;
    state.mark = null;
    for (const element of document.querySelectorAll("[data-run]")) element.hidden = Number(element.dataset.run) !== run;
    redraw((chart) => !chart.overlay);
    for (const part of Object.values(parts)) part.update(data.runs[run]);
  }

  // Hide a run in the charts that show all, or show it again.
  function toggle(run) {
    state.hidden = state.hidden.includes(run) ? state.hidden.filter((one) => one !== run) : [...state.hidden, run];
    show();
    redraw((chart) => chart.overlay);
  }

  function see(finding) {
    const { chart, steps } = data.runs[state.run].findings[finding];
    state.mark = { chart, steps };
    const card = $(`chart-${chart}`);
    for (const one of document.querySelectorAll(".marked")) one.classList.remove("marked");
    card.classList.add("marked");
    card.scrollIntoView({ block: "center" });
    drawn(card.querySelector("[data-chart]"));
    redraw();
  }

  // ---------------------------------------------------------------- controls

  function listen() {
    $("theme").addEventListener("click", () => { state.theme = isDark() ? "light" : "dark"; applyTheme(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
    $("run")?.addEventListener("change", (event) => choose(Number(event.target.value)));
    $("smoothing").addEventListener("input", (event) => { state.smoothing = Number(event.target.value); show(); redraw((chart) => chart.section === "dynamics"); });
    $("paper").addEventListener("change", (event) => { state.paper = event.target.value; show(); redraw((chart) => chart.ghosts); });
    document.addEventListener("click", (event) => {
      const button = event.target.closest("[data-see]");
      if (button) see(Number(button.dataset.see));
      const chip = event.target.closest("[data-chip]");
      if (chip) toggle(Number(chip.dataset.chip));
    });
    window.addEventListener("pagehide", remember);
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
  }

  // ---------------------------------------------------------------- start

  async function start() {
    data = await unpack($("data"));
    const kept = recall();
    const longest = Math.max(...data.runs.map((run) => run.steps.length));
    state.smoothing = kept.smoothing ?? (longest >= 100 ? 0.6 : 0);
    state.paper = kept.paper ?? "off";
    state.theme = kept.theme ?? null;
    state.hidden = kept.hidden ?? [];
    state.run = data.runs[kept.run] ? kept.run : 0;
    if (state.theme) document.documentElement.dataset.theme = state.theme;
    show();
    parts.timeline = Timeline.mount($("timeline"), data.runs[state.run]);
    parts.rollouts = Rollouts.mount($("rollouts-view"), data.runs[state.run], openBlob);
    if (state.run) choose(state.run);
    for (const chart of data.charts) {
      const element = document.querySelector(`[data-chart="${chart.id}"]`);
      charts.set(element, { chart, handle: null, isNear: false, isStale: false });
      visible.observe(element);
    }
    for (const [name, part] of Object.entries(parts)) {
      if (kept.parts?.[name] != null) part.restore?.(kept.parts[name]);
      part.theme(isDark());
    }
    listen();
    if (kept.scroll) window.scrollTo(0, kept.scroll);
    if (data.refresh_seconds) setTimeout(() => location.reload(), 1000 * data.refresh_seconds);
    document.body.dataset.ready = "true";
  }

  start();
  return { openBlob };
})();
