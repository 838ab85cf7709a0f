"use strict";

// Controls of the page (run, smoothing, theme), and lazy drawing of the figures.
(() => {
  const CONFIG = { displayModeBar: false, responsive: true };
  const $ = (id) => document.getElementById(id);
  const elements = [...document.querySelectorAll("[data-figure]")];
  const state = { run: 0, smoothing: Number($("smoothing").value) };
  let data;

  // Unpacks the JSON of a script element (base64 of gzip).
  async function unpack(element) {
    const text = atob(element.textContent);
    const bytes = new Uint8Array(text.length); // Uint8Array.from is many times slower
    for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).json();
  }

  // Figures are drawn when they are near the visible part of the page.
  const near = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) if (isIntersecting) draw(target);
  }, { rootMargin: "400px" });

  function draw(element) {
    if (element.dataset.drawn === "true") return;
    const figures = data.figures[element.dataset.figure];
    const figure = figures[state.run] ?? figures[0];
    const template = data.templates[isDark() ? "dark" : "light"];
    Plotly.react(element, figure.data.flatMap(smoothed), { ...figure.layout, template, uirevision: state.run }, CONFIG);
    element.dataset.drawn = "true";
  }

  // Returns the traces to draw for a trace: lines are drawn faintly, and smoothed.
  function smoothed(trace) {
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
    for (const element of elements) {
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

  function chooseRun(run) {
    state.run = run;
    for (const element of document.querySelectorAll("[data-run]")) element.hidden = Number(element.dataset.run) !== run;
    redraw();
  }

  function listen() {
    $("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    $("run")?.addEventListener("change", (event) => chooseRun(Number(event.target.value)));
    $("smoothing").addEventListener("change", (event) => { state.smoothing = Number(event.target.value); redraw(); });
    let theme; // printing uses the light theme, and needs all visible figures drawn
    addEventListener("beforeprint", () => {
      theme = document.documentElement.dataset.theme;
      setTheme("light");
      for (const element of elements) if (element.checkVisibility()) draw(element);
    });
    addEventListener("afterprint", () => setTheme(theme));
  }

  async function start() {
    data = await unpack($("data"));
    Rollouts.mount((id) => unpack($(`group-${id}`)));
    redraw();
    listen();
    document.body.dataset.ready = "true";
  }

  start();
})();
