"use strict";

// Shows the Plotly figures of report/figures.py: what the reader chose decides which traces are seen.
const Figures = (() => {
  const CONFIG = { displayModeBar: false, responsive: true, showSendToCloud: false, plotlyServerURL: "" };

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // A figure with the style sheet's variables, var(--name) or var(--name, opacity), as colours.
  function themed(value, key = "") {
    if (typeof value === "string" && /color/.test(key)) {
      return value.replace(/^var\((--[\w-]+)(?:, (\w\w))?\)$/, (_, name, opacity = "") => css(name) + opacity);
    }
    if (Array.isArray(value)) return key === "colorscale" || typeof value[0] === "object" ? value.map((one) => themed(one, key)) : value;
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, name === "z" ? inner : themed(inner, name)]));
  }

  // Exponential moving average, as if what came before the first value were like it.
  function average(values, weight) {
    let sum = 0, norm = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  }

  // The measured values, faint, and the smoothed ones.
  function smoothed(trace, weight) {
    if (!weight || !trace.meta?.smooth) return [trace];
    return [
      { ...trace, opacity: 0.28, showlegend: false, hoverinfo: "skip", line: { color: trace.line.color, width: 1 } },
      { ...trace, customdata: trace.y, y: average(trace.y, weight), hovertemplate: trace.meta.smooth, line: { ...trace.line, width: trace.line.width + 0.4 } },
    ];
  }

  const merged = (one, other) => {
    const both = { ...one };
    for (const [name, value] of Object.entries(other)) both[name] = value?.constructor === Object ? merged(one[name] ?? {}, value) : value;
    return both;
  };

  // `state`: {smoothing, paper, hidden: looks, run}. `marked`: steps to point out, or null.
  function draw(element, figure, template, state, marked) {
    const paper = figure.paper?.[state.paper] ?? { data: [], layout: {} };
    const shown = figure.data.filter(({ meta }) => !state.hidden.includes(meta?.look));
    const layout = merged(figure.layout, paper.layout);
    const [low, high] = layout.xaxis.range;
    // Steps that are all of the run need no mark.
    if (marked && marked[1] - marked[0] < 0.8 * (high - low)) {
      layout.shapes = [{ type: "rect", xref: "x", yref: "paper", x0: marked[0] - 0.5, x1: marked[1] + 0.5, y0: 0, y1: 1,
        line: { width: 0 }, fillcolor: "var(--accent, 29)", layer: "below" }];
    }
    const whole = { data: [...paper.data, ...shown.flatMap((trace) => smoothed(trace, state.smoothing))],
      layout: { ...layout, template, uirevision: `${state.run}/${state.paper}` } };
    const { data, layout: styled } = themed(whole);
    element.wholeRange = [low, high];
    element.setAttribute("aria-label", figure.label);
    Plotly.react(element, data, styled, CONFIG);
    element.dataset.drawn = "true";
  }

  // The part of a figure that a reader has zoomed to, as changes of its layout; null for all of it.
  function zoom({ layout: { xaxis, yaxis }, wholeRange }) {
    const isWhole = xaxis.range.every((end, at) => Math.abs(end - wholeRange[at]) < 1e-9);
    const changes = isWhole ? {} : { "xaxis.range": xaxis.range };
    if (yaxis.autorange === false && !yaxis.fixedrange) changes["yaxis.range"] = yaxis.range;
    return Object.keys(changes).length ? changes : null;
  }

  return { draw, zoom };
})();
