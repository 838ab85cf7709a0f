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

  // The runs of a chart: all that are not hidden, or the chosen one.
  function runsOf(chart, data, state) {
    const all = data.runs.map((run, number) => ({ run, number }));
    return chart.overlay ? all.filter(({ number }) => !state.hidden.includes(number)) : [all[state.run]];
  }

  // One run: a colour for each series. Several: a colour for each run, a dash for each series.
  function look(isOne, number, place, series) {
    if (isOne) {
      return { color: slot(series.color ?? place), dash: series.dash ? "dash" : "solid" };
    }
    const turn = Math.floor(number / 8) + place;
    return { color: slot(number), dash: DASHES[turn % DASHES.length] };
  }

  // Plotly takes text for a kind of HTML; a name of a run or a data set is none.
  const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const named = (isOne, run, label) => plain(isOne ? label : [run.name, label].filter(Boolean).join(" · "));

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

  function lines(chart, runs, isOne, state) {
    const traces = [];
    for (const { run, number } of runs) {
      if (chart.band && run.metrics[chart.band.low]) traces.push(...band(chart.band, run, slot(number)));
      chart.series.forEach((series, place) => {
        const values = run.metrics[series.metric];
        if (!values) return;
        const { color, dash } = look(isOne, number, place, series);
        const trace = {
          x: run.steps, y: values, type: "scatter", mode: run.steps.length > 1 ? "lines" : "markers",
          name: named(isOne, run, isOne || chart.series.length > 1 ? series.label : ""), line: { color, dash, width: 1.8 }, marker: { color, size: 6 },
          yaxis: series.axis ?? "y", legendgroup: series.label,
        };
        if (state.smoothing > 0 && chart.smooth !== false) {
          traces.push({ ...trace, opacity: 0.28, showlegend: false, hoverinfo: "skip",
            line: { color, width: 1 } });
          trace.customdata = values;
          trace.y = smoothed(values, state.smoothing);
          trace.hovertemplate = `%{customdata:${hoverFormat(chart.y_tick_format)}} (smoothed %{y})`;
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

  function evaluations(chart, runs, isOne) {
    const traces = [];
    for (const { run, number } of runs) {
      const curves = run.evaluations.filter((one) => chart.evaluations.some((start) => one.figure.startsWith(start)));
      const sets = [...new Set(curves.map((one) => one.set))];
      for (const { set, figure, points } of curves) {
        const color = slot(isOne ? sets.indexOf(set) : number);
        const dash = DASHES[chart.evaluations.findIndex((start) => figure.startsWith(start)) +
          (isOne ? 0 : sets.indexOf(set) + Math.floor(number / 8))] ?? "dot";
        const error = (place, sign) => points.map((one) => (one[place] === null ? 0 : sign * (one[place] - one[1])));
        traces.push({
          x: points.map((one) => one[0]), y: points.map((one) => one[1]), type: "scatter", mode: "lines+markers",
          name: named(isOne, run, `${set} ${figure}`), legendgroup: `${set} ${figure}`, line: { color, dash, width: 2 }, marker: { color, size: 7 },
          error_y: { type: "data", symmetric: false, array: error(3, 1), arrayminus: error(2, -1),
            color: faint(color, 0.55), thickness: 1.5, width: 4 },
          customdata: points.map((one) => [one[2] ?? one[1], one[3] ?? one[1]]),
          hovertemplate: `%{y} (%{customdata[0]:${hoverFormat(chart.y_tick_format)}} to %{customdata[1]:${hoverFormat(chart.y_tick_format)}})`,
        });
      }
    }
    return traces;
  }

  function stacked(chart, runs, isOne) {
    return runs.flatMap(({ run, number }) => chart.series.filter((one) => run.metrics[one.metric]).map((series) => {
      const color = slot(series.color ?? chart.series.indexOf(series));
      const values = run.metrics[series.metric];
      const trace = { x: run.steps, y: values, name: named(isOne, run, series.label), yaxis: series.axis ?? "y" };
      // A line over what is stacked.
      if (series.line) return { ...trace, type: "scatter", mode: "lines", line: { color, width: 2 } };
      const whole = { ...trace, y: chart.kind === "bars" ? values : values.map((one) => one ?? 0) };
      if (chart.kind !== "stacked_area") return { ...whole, type: "bar", marker: { color } };
      return { ...whole, type: "scatter", mode: "lines", stackgroup: String(number),
        line: { color, width: 0.8 }, fillcolor: faint(color, 0.55) };
    }));
  }

  function ghosts(chart, data, state, end) {
    if (state.paper === "off") return [];
    return (chart.ghosts ?? []).map((key, place) => {
      const { label, source, points } = data.paper[key];
      const shown = state.paper === "all" ? points : points.filter((one) => one[0] <= end);
      return {
        x: shown.map((one) => one[0]), y: shown.map((one) => one[1]), type: "scatter", mode: "lines", name: `${label} (${source})`,
        line: { color: css("--muted"), width: 1.6, dash: DASHES[(2 + place) % 4] },
      };
    });
  }

  // Finer than the axis: d3's format of one value.
  function hoverFormat(format = "") {
    if (format.endsWith("%")) return ".2~%";
    return format.endsWith("e") ? ".2e" : ".4~g";
  }

  // Of several runs, colours are told once for the page (app.js); a chart's legend tells its dashes.
  function legend(traces) {
    const entries = new Map();
    for (const trace of traces) {
      const isTold = trace.legendgroup && trace.showlegend !== false;
      trace.showlegend = false;
      if (isTold && !entries.has(trace.legendgroup)) {
        entries.set(trace.legendgroup, { x: [null], y: [null], type: "scatter", mode: "lines", name: plain(trace.legendgroup),
          legendgroup: trace.legendgroup, line: { color: css("--fg"), dash: trace.line.dash, width: 1.8 } });
      }
    }
    return entries.size > 1 ? [...entries.values()] : [];
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
      title: { standoff: 10, font: { size: 12 } } };
    const pad = Math.max(0.5, 0.015 * (range[1] - range[0]));
    const made = {
      autosize: true, margin: { l: 68, r: chart.y2 ? 68 : 14, t: 30, b: 42 }, paper_bgcolor: "rgba(0,0,0,0)",
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
        hoverformat: hoverFormat(chart.y_tick_format), nticks: 6, range: chart.y_range, exponentformat: "power" },
      shapes: [],
    };
    if (chart.y2) made.yaxis2 = { ...axis, overlaying: "y", side: "right", showgrid: false, title: { ...axis.title, text: chart.y2 },
      tickformat: chart.y2_tick_format, hoverformat: hoverFormat(chart.y2_tick_format), tickmode: "auto", nticks: 5, rangemode: "nonnegative" };
    const mark = state.mark;
    // Steps that are all of the run need no mark.
    if (mark?.chart === chart.id && mark.steps && mark.steps[1] - mark.steps[0] < 0.8 * (range[1] - range[0])) {
      made.shapes.push({ type: "rect", xref: "x", yref: "paper", x0: mark.steps[0] - 0.5, x1: mark.steps[1] + 0.5,
        y0: 0, y1: 1, line: { width: 0 }, fillcolor: faint(css("--accent"), 0.16), layer: "below" });
    }
    return made;
  }

  // An axis of what is never negative does not go below 0; a log axis has a few labels.
  function fit(axis, chart, found) {
    const values = found.filter((one) => one !== null);
    if (chart.log_y) {
      const positive = values.filter((one) => one > 0).map(Math.log10);
      const decades = positive.reduce((a, b) => Math.max(a, b), -Infinity) - positive.reduce((a, b) => Math.min(a, b), Infinity);
      axis.dtick = Math.max(1, Math.ceil(decades / 5));
    } else if (values.every((one) => one >= 0)) {
      axis.rangemode = chart.from_zero ? "tozero" : "nonnegative";
    }
  }

  // Draw a chart into an element; `update` draws it again in another state.
  function draw(element, chart, data, first) {
    function update(state) {
      const runs = runsOf(chart, data, state);
      const range = reach(data);
      const paper = ghosts(chart, data, state, range[1]);
      if (state.paper === "all") range[1] = paper.reduce((end, one) => Math.max(end, one.x.at(-1) ?? 0), range[1]);
      const isOne = !chart.overlay || data.runs.length === 1;
      const own = chart.evaluations?.length ? evaluations(chart, runs, isOne) : [];
      own.push(...(chart.kind === "lines" ? lines(chart, runs, isOne, state) : stacked(chart, runs, isOne)));
      const made = layout(chart, data, state, range);
      fit(made.yaxis, chart, own.filter((one) => (one.yaxis ?? "y") === "y").flatMap((one) => one.y));
      if (!own.length) made.annotations = [{ text: "not recorded by this run", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }];
      const entries = isOne ? [] : legend(own);
      made.showlegend = [...paper, ...entries, ...own].filter((one) => one.showlegend !== false).length > (isOne ? 1 : 0) ||
        (isOne && !!chart.evaluations);
      own.push(...entries);
      Plotly.react(element, [...paper, ...own], made, CONFIG);
      element.dataset.drawn = "true";
    }
    update(first);
    return { update };
  }

  return { draw };
})();
