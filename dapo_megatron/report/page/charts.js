"use strict";

// Draws a chart definition (report/charts.py). What is drawn of which metric is said there; nothing
// here knows a metric by name.
const Charts = (() => {
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const CONFIG = {
    displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "",
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d", "zoomIn2d", "zoomOut2d"],
  };

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const slot = (number) => css(`--series-${number % 8}`);

  // The runs of a chart: all of them, or the chosen one.
  function runsOf(chart, data, state) {
    const all = data.runs.map((run, number) => ({ run, number }));
    return chart.overlay ? all : [all[state.run]];
  }

  // One run: a colour for each series. Several: a colour for each run, a dash for each series.
  function look(runs, number, place, series) {
    if (runs.length === 1) {
      return { color: slot(series.color ?? place), dash: series.dash ? "dash" : "solid" };
    }
    const turn = Math.floor(number / 8) + place;
    return { color: slot(number), dash: DASHES[turn % DASHES.length] };
  }

  const named = (runs, run, label) => (runs.length === 1 ? label : `${run.name} · ${label}`);

  // Exponential moving average, as if what came before the first value were like it.
  function smoothed(values, weight) {
    let sum = 0, norm = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      norm = weight * norm + (1 - weight);
      return sum / norm;
    });
  }

  function lines(chart, runs, state) {
    const traces = [];
    for (const { run, number } of runs) {
      if (chart.band && run.metrics[chart.band.low]) traces.push(...band(chart.band, run, slot(number)));
      chart.series.forEach((series, place) => {
        const values = run.metrics[series.metric];
        if (!values) return;
        const { color, dash } = look(runs, number, place, series);
        const trace = {
          x: run.steps, y: values, type: "scatter", mode: run.steps.length > 1 ? "lines" : "markers",
          name: named(runs, run, series.label), line: { color, dash, width: 1.8 }, marker: { color, size: 6 },
          yaxis: series.axis ?? "y", legendgroup: `${number}/${place}`,
        };
        if (state.smoothing > 0 && chart.smooth !== false) {
          traces.push({ ...trace, opacity: 0.28, showlegend: false, hoverinfo: "skip",
            line: { color, width: 1 } });
          trace.customdata = values;
          trace.y = smoothed(values, state.smoothing);
          trace.hovertemplate = `%{customdata:${hoverFormat(chart)}} (smoothed %{y})`;
          trace.line.width = 2.2;
        }
        traces.push(trace);
      });
    }
    return traces;
  }

  function band({ low, high }, run, color) {
    const edge = { x: run.steps, type: "scatter", mode: "lines", line: { width: 0 }, showlegend: false, hoverinfo: "skip" };
    return [{ ...edge, y: run.metrics[low] },
      { ...edge, y: run.metrics[high], fill: "tonexty", fillcolor: faint(color, 0.15) }];
  }

  // "#rrggbb" with an opacity.
  const faint = (color, opacity) => color + Math.round(opacity * 255).toString(16).padStart(2, "0");

  function evaluations(chart, runs) {
    const traces = [];
    for (const { run, number } of runs) {
      const curves = run.evaluations.filter((one) => chart.evaluations.some((start) => one.figure.startsWith(start)));
      const sets = [...new Set(curves.map((one) => one.set))];
      for (const { set, figure, points } of curves) {
        const color = slot(runs.length === 1 ? sets.indexOf(set) : number);
        const dash = DASHES[chart.evaluations.findIndex((start) => figure.startsWith(start)) +
          (runs.length === 1 ? 0 : sets.indexOf(set))] ?? "dot";
        const error = (place, sign) => points.map((one) => (one[place] === null ? 0 : sign * (one[place] - one[1])));
        traces.push({
          x: points.map((one) => one[0]), y: points.map((one) => one[1]), type: "scatter", mode: "lines+markers",
          name: named(runs, run, `${set} ${figure}`), line: { color, dash, width: 2 }, marker: { color, size: 7 },
          error_y: { type: "data", symmetric: false, array: error(3, 1), arrayminus: error(2, -1),
            color: faint(color, 0.55), thickness: 1.5, width: 4 },
          customdata: points.map((one) => [one[2] ?? one[1], one[3] ?? one[1]]),
          hovertemplate: `%{y} (%{customdata[0]:${hoverFormat(chart)}} to %{customdata[1]:${hoverFormat(chart)}})`,
        });
      }
    }
    return traces;
  }

  function stacked(chart, runs) {
    return runs.flatMap(({ run, number }) => chart.series.filter((one) => run.metrics[one.metric]).map((series) => {
      const place = chart.series.indexOf(series);
      const color = slot(series.color ?? place);
      const trace = { x: run.steps, y: run.metrics[series.metric], name: named(runs, run, series.label) };
      if (chart.kind !== "stacked_area") return { ...trace, type: "bar", marker: { color } };
      return { ...trace, type: "scatter", mode: "lines", stackgroup: String(number),
        line: { color, width: 0.8 }, fillcolor: faint(color, 0.55) };
    }));
  }

  function ghosts(chart, data, state, end) {
    if (state.paper === "off") return [];
    return (chart.ghosts ?? []).map((key, place) => {
      const { label, points } = data.paper[key];
      const shown = state.paper === "all" ? points : points.filter((one) => one[0] <= end);
      return {
        x: shown.map((one) => one[0]), y: shown.map((one) => one[1]), type: "scatter", mode: "lines", name: label,
        line: { color: css("--muted"), width: 1.6, dash: DASHES[(2 + place) % 4] },
      };
    });
  }

  function hoverFormat(chart) {
    const format = chart.y_tick_format ?? "";
    if (format.endsWith("%")) return ".2~%";
    return format.endsWith("e") ? ".2e" : ".4~g";
  }

  // First and last step that these traces reach, the same for all charts of all runs.
  function reach(data) {
    const steps = data.runs.flatMap((run) => run.steps);
    const low = steps.reduce((a, b) => Math.min(a, b), Infinity);
    const high = steps.reduce((a, b) => Math.max(a, b), 1);
    return [low > 1 && low < Infinity ? low : 0, high];
  }

  function layout(chart, data, state, range) {
    const axis = { gridcolor: css("--line"), linecolor: css("--line"), tickcolor: css("--line"), zeroline: false,
      automargin: true, title: { standoff: 10, font: { size: 12 } } };
    const pad = Math.max(0.5, 0.015 * (range[1] - range[0]));
    const made = {
      autosize: true, margin: { l: 56, r: chart.y2 ? 56 : 12, t: 10, b: 38 }, paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)", font: { family: css("--font") || getComputedStyle(document.body).fontFamily,
        size: 12, color: css("--muted") },
      hovermode: "x unified", hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"),
        font: { color: css("--fg"), size: 12 }, namelength: 48 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 } },
      showlegend: true, uirevision: `${state.run}/${state.paper}`, bargap: 0.15,
      barmode: chart.kind === "stacked_bars" ? "stack" : "group", modebar: { bgcolor: "rgba(0,0,0,0)",
        color: css("--muted"), activecolor: css("--fg") },
      xaxis: { ...axis, showgrid: false, ticks: "outside", ticklen: 4, tickformat: ",d", title: { ...axis.title, text: "rollout step" },
        range: [range[0] - pad, range[1] + pad], unifiedhovertitle: { text: "step %{x}" } },
      yaxis: { ...axis, title: { ...axis.title, text: chart.y }, tickformat: chart.y_tick_format, type: chart.log_y ? "log" : "linear",
        hoverformat: hoverFormat(chart), nticks: 6, range: chart.y_range, exponentformat: "power",
        ...(chart.log_y ? { dtick: 1 } : {}) },
      shapes: [],
    };
    if (chart.y2) made.yaxis2 = { ...axis, overlaying: "y", side: "right", showgrid: false, title: { ...axis.title, text: chart.y2 }, nticks: 6 };
    const mark = state.mark;
    if (mark && mark.chart === chart.id && mark.steps) {
      made.shapes.push({ type: "rect", xref: "x", yref: "paper", x0: mark.steps[0] - 0.5, x1: mark.steps[1] + 0.5,
        y0: 0, y1: 1, line: { width: 0 }, fillcolor: faint(css("--accent"), 0.16), layer: "below" });
    }
    return made;
  }

  // Draw a chart into an element; `update` draws it again in another state.
  function draw(element, chart, data, first) {
    function update(state) {
      const runs = runsOf(chart, data, state);
      const range = reach(data);
      const paper = ghosts(chart, data, state, range[1]);
      if (state.paper === "all") range[1] = paper.reduce((end, one) => Math.max(end, one.x.at(-1) ?? 0), range[1]);
      const own = chart.evaluations?.length ? evaluations(chart, runs) : [];
      own.push(...(chart.kind === "lines" ? lines(chart, runs, state) : stacked(chart, runs)));
      const made = layout(chart, data, state, range);
      made.showlegend = own.filter((one) => one.showlegend !== false).length + paper.length > 1 || !!chart.evaluations;
      if (!made.showlegend) made.margin.t = 26;
      if (!own.length) made.annotations = [{ text: "not recorded by this run", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }];
      Plotly.react(element, [...paper, ...own], made, CONFIG);
      element.dataset.drawn = "true";
    }
    update(first);
    return { update };
  }

  return { draw };
})();
