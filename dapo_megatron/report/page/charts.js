"use strict";

// Draws a chart definition (report/charts.py). What is drawn of which metric is said there; nothing
// here knows a metric by name.
const Charts = (() => {
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const CONFIG = { displayModeBar: false, responsive: true, showSendToCloud: false, plotlyServerURL: "" };
  // So many curves are told under the pointer one by one, and in words by the table alone.
  const MANY = 8;
  // Each bar is an element, which takes long to make; of so many none could be told from its neighbour.
  const MANY_BARS = 250;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const slot = (number) => css(`--series-${number % 8}`);

  // The runs of a chart: all that are not hidden, or the chosen one.
  function runsOf(chart, data, state) {
    const all = data.runs.map((run, number) => ({ run, number, look: data.looks.findIndex((one) => one.runs.includes(number)) }));
    const shown = chart.overlay ? all.filter(({ look }) => !state.hidden.includes(look)) : [all[state.run]];
    return shown.map((one) => ({ ...one, look: data.looks[one.look] }));
  }

  // One run: a colour for each series. Several: colour and width tell the run, dashes the series.
  function stroke(isOne, look, place, series) {
    if (isOne) return { color: slot(series.color ?? place), dash: series.dash ? "dash" : "solid", width: 1.8 };
    return { color: slot(look.color), dash: DASHES[place % DASHES.length], width: look.width };
  }

  // Plotly takes text for a kind of HTML; a name of a run or a data set is none.
  const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const named = (isOne, run, label) => (isOne ? label : [run.name, label].filter(Boolean).join(" · "));

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
    for (const { run, look } of runs) {
      chart.series.forEach((series, place) => {
        const values = run.metrics[series.metric];
        if (!values) return;
        const line = stroke(isOne, look, place, series);
        const trace = {
          x: run.steps, y: values, type: "scatter", mode: run.steps.length > 1 ? "lines" : "markers",
          name: named(isOne, run, isOne || chart.series.length > 1 ? series.label : ""), line, marker: { color: line.color, size: 6 },
          yaxis: series.axis ?? "y", legendgroup: series.label, measured: values,
        };
        if (state.smoothing > 0 && chart.smooth !== false) {
          traces.push({ ...trace, opacity: 0.28, showlegend: false, hoverinfo: "skip",
            line: { color: line.color, width: 1 } });
          trace.customdata = values;
          trace.y = smoothed(values, state.smoothing);
          trace.hovertemplate = `%{customdata:${hoverFormat(chart.y_tick_format)}} (smoothed %{y})`;
          trace.line = { ...line, width: line.width + 0.4 };
        }
        traces.push(trace);
      });
    }
    return traces;
  }

  // "#rrggbb" with an opacity.
  const faint = (color, opacity) => color + Math.round(opacity * 255).toString(16).padStart(2, "0");

  function evaluations(chart, data, runs, isOne) {
    const traces = [];
    const kinds = chart.evaluations;
    const sets = [...new Set(data.runs.flatMap((run) => run.evaluations.map((one) => one.set)))];
    for (const { run, look } of runs) {
      for (const { set, figure, points } of run.evaluations) {
        const kind = kinds.findIndex((start) => figure.startsWith(start));
        if (kind < 0) continue;
        const place = sets.indexOf(set);
        const line = isOne ? { color: slot(place), dash: DASHES[kind % DASHES.length], width: 2 } :
          stroke(isOne, look, kind + kinds.length * place);
        const error = (place, sign) => points.map((one) => (one[place] === null ? 0 : sign * (one[place] - one[1])));
        traces.push({
          x: points.map((one) => one[0]), y: points.map((one) => one[1]), type: "scatter", mode: "lines+markers",
          name: named(isOne, run, `${set} ${figure}`), legendgroup: `${set} ${figure}`, line, marker: { color: line.color, size: 4 + line.width },
          error_y: { type: "data", symmetric: false, array: error(3, 1), arrayminus: error(2, -1),
            color: faint(line.color, runs.length > MANY ? 0.2 : 0.55), thickness: 1.5, width: runs.length > MANY ? 0 : 4 },
          measured: points.map((one) => one[1]),
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
      const trace = { x: run.steps, y: values, name: named(isOne, run, series.label), yaxis: series.axis ?? "y", measured: values };
      // A line over what is stacked.
      if (series.line) return { ...trace, type: "scatter", mode: "lines", line: { color, width: 2 } };
      const whole = { ...trace, y: values.map((one) => one ?? 0) };
      if (chart.kind === "stacked_bars") {
        if (run.steps.length <= MANY_BARS) return { ...whole, type: "bar", marker: { color } };
        return { ...whole, type: "scatter", mode: "lines", stackgroup: String(number), line: { color, width: 0, shape: "hvh" }, fillcolor: color };
      }
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
      plot_bgcolor: "rgba(0,0,0,0)", font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--muted") },
      hovermode: "x unified", hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"),
        font: { color: css("--fg"), size: 12 }, namelength: 48 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 } },
      showlegend: true, uirevision: `${state.run}/${state.paper}`, bargap: 0.15,
      barmode: "stack",
      xaxis: { ...axis, showgrid: false, ticks: "outside", ticklen: 4, tickformat: ",d", title: { ...axis.title, text: "rollout step" },
        range: [range[0] - pad, range[1] + pad], unifiedhovertitle: { text: "step %{x}" } },
      yaxis: { ...axis, title: { ...axis.title, text: chart.y }, tickformat: chart.y_tick_format, type: chart.log_y ? "log" : "linear",
        hoverformat: hoverFormat(chart.y_tick_format), nticks: 6, range: chart.y_range, exponentformat: "power" },
      shapes: [],
    };
    if (chart.y2) made.yaxis2 = { ...axis, overlaying: "y", side: "right", showgrid: false, title: { ...axis.title, text: chart.y2 },
      tickformat: chart.y2_tick_format, hoverformat: hoverFormat(chart.y2_tick_format), tickmode: "auto", nticks: 5 };
    const mark = state.mark;
    // Steps that are all of the run need no mark.
    if (mark?.chart === chart.id && mark.steps && mark.steps[1] - mark.steps[0] < 0.8 * (range[1] - range[0])) {
      made.shapes.push({ type: "rect", xref: "x", yref: "paper", x0: mark.steps[0] - 0.5, x1: mark.steps[1] + 0.5,
        y0: 0, y1: 1, line: { width: 0 }, fillcolor: faint(css("--accent"), 0.16), layer: "below" });
    }
    return made;
  }

  // The values of the traces that lie on an axis.
  const on = (axis, traces) => traces.filter((one) => (one.yaxis ?? "y") === axis).flatMap((one) => one.y).filter((one) => one !== null);
  const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
  const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

  // An axis of what is never negative does not go below 0, and that of a constant begins there; a
  // log axis has a few labels.
  function fit(axis, chart, values) {
    if (axis.type === "log") {
      const positive = values.filter((one) => one > 0).map(Math.log10);
      axis.dtick = Math.max(1, Math.ceil((most(positive) - least(positive)) / 5));
    } else if (least(values) >= 0) {
      axis.rangemode = chart.from_zero || least(values) === most(values) ? "tozero" : "nonnegative";
    }
  }

  // The paper's curves get an axis of their own where one of the two would lie flat on a common one.
  function part(paper, own, made, chart) {
    const [theirs, ours] = [paper, own].map((traces) => most(on("y", traces).map(Math.abs)));
    const ratio = theirs / ours;
    if (chart.y2 || !paper.length || !(ratio > 3 || ratio < 1 / 3)) return;
    for (const one of paper) one.yaxis = "y2";
    made.margin.r = 68;
    made.yaxis2 = { ...made.yaxis, overlaying: "y", side: "right", showgrid: false, range: undefined, tickmode: "auto",
      title: { ...made.yaxis.title, text: `paper: ${chart.y}` } };
    fit(made.yaxis2, chart, on("y2", paper));
  }

  // Too many curves for one box under the pointer: each has its own.
  function apart(made, traces) {
    made.hovermode = "closest";
    made.hoverlabel.namelength = -1;
    for (const one of traces) if (one.hoverinfo !== "skip") one.hovertemplate = `step %{x}: ${one.hovertemplate ?? "%{y}"}`;
  }

  // ---------------------------------------------------------------- values in words

  function format(value, chart, axis) {
    const kind = axis === "y2" ? chart.y2_tick_format : chart.y_tick_format;
    if (kind?.endsWith("%")) return `${Number((100 * value).toPrecision(3))}%`;
    return Math.abs(value) >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  }

  // Of each curve [name, first, last, lowest, highest], each of these as {value, step} in words.
  function extremes(chart, traces) {
    return traces.filter((one) => one.hoverinfo !== "skip").map((trace) => {
      const points = trace.measured.map((value, at) => [value, trace.x[at]]).filter(([value]) => value !== null);
      if (!points.length) return [trace.name];
      const best = (isBetter) => points.reduce((a, b) => (isBetter(b[0], a[0]) ? b : a));
      return [trace.name, ...[points[0], points.at(-1), best((a, b) => a < b), best((a, b) => a > b)].map(
        ([value, step]) => ({ value: format(value, chart, trace.yaxis), step }))];
    });
  }

  function describe(element, chart, rows) {
    const said = rows.filter((row) => row.length > 1).map(([name, first, last, low, high]) => `${name}: ${first.value} at step ${first.step}, ` +
      `${last.value} at step ${last.step}, lowest ${low.value}, highest ${high.value}`);
    element.setAttribute("aria-label", `${chart.title}. ${said.length > MANY ? `${said.length} curves; see its values below` : said.join("; ") || "Not recorded"}.`);
  }

  function table(rows) {
    const made = document.createElement("table");
    const add = (row, tag, text, scope) => {
      const cell = row.appendChild(document.createElement(tag));
      cell.textContent = text;
      if (scope) cell.scope = scope;
    };
    const head = made.createTHead().insertRow();
    for (const text of ["", "first", "last", "lowest", "highest"]) add(head, "th", text, "col");
    const body = made.createTBody();
    for (const [name, ...points] of rows) {
      const row = body.insertRow();
      add(row, "th", name, "row");
      for (const { value, step } of points) add(row, "td", `${value} at ${step}`);
    }
    return made;
  }

  // ---------------------------------------------------------------- drawing

  // Draw a chart into an element, and its values into the <details> beside it. `update` draws it
  // again in another state; `zoom` says what part of it a reader has chosen, or sets it.
  function draw(element, chart, data, first) {
    const details = element.parentElement.querySelector(".values");
    const frame = details.appendChild(document.createElement("div"));
    frame.tabIndex = 0;
    frame.setAttribute("role", "region");
    frame.setAttribute("aria-label", `values of ${chart.title}`);
    let rows = [], whole;

    const list = () => frame.replaceChildren(...(details.open ? [table(rows)] : []));

    function update(state) {
      const runs = runsOf(chart, data, state);
      const range = reach(data);
      const paper = ghosts(chart, data, state, range[1]);
      if (state.paper === "all") range[1] = paper.reduce((end, one) => Math.max(end, one.x.at(-1) ?? 0), range[1]);
      const isOne = !chart.overlay || data.runs.length === 1;
      const own = chart.evaluations?.length ? evaluations(chart, data, runs, isOne) : [];
      own.push(...(chart.kind === "lines" ? lines(chart, runs, isOne, state) : stacked(chart, runs, isOne)));
      const made = layout(chart, data, state, range);
      part(paper, own, made, chart);
      const shared = paper.filter((one) => one.yaxis !== "y2");
      fit(made.yaxis, chart, on("y", [...own, ...shared]));
      if (chart.y2) fit(made.yaxis2, {}, on("y2", own));
      if (!own.length) made.annotations = [{ text: "not recorded by this run", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }];
      rows = extremes(chart, own);
      for (const one of own) one.name = plain(one.name);
      describe(element, chart, rows);
      list();
      if (rows.length > MANY) apart(made, own);
      const entries = isOne ? [] : legend(own);
      made.showlegend = [...paper, ...entries, ...own].filter((one) => one.showlegend !== false).length > (isOne ? 1 : 0) ||
        (isOne && !!chart.evaluations);
      own.push(...entries);
      whole = made.xaxis.range.map(Number);
      Plotly.react(element, [...paper, ...own], made, CONFIG);
      element.dataset.drawn = "true";
    }

    function zoom(to) {
      if (to) return Plotly.relayout(element, to);
      const { xaxis, yaxis } = element.layout;
      const isWhole = xaxis.range.every((one, at) => Math.abs(one - whole[at]) < 1e-9);
      const found = isWhole ? {} : { "xaxis.range": xaxis.range };
      if (yaxis.autorange === false) found["yaxis.range"] = yaxis.range;
      return Object.keys(found).length ? found : null;
    }

    details.addEventListener("toggle", list);
    update(first);
    return { update, zoom };
  }

  return { draw };
})();
