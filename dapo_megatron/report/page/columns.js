"use strict";

// The rows and columns of the table of completions: names, how values are written, which of them filter.
const RolloutColumns = (() => {
  const number = new Intl.NumberFormat("en-US");
  const fixed = (digits) => (value) => value == null ? "–" : signed(value.toFixed(digits));
  const signed = (text) => text.replace("-", "\u2212");
  const text = (value) => value == null ? "–" : String(value);
  const plain = (value) => value == null ? "–" : signed(String(value));
  const counted = (value) => value == null ? "–" : number.format(value);
  const words = (value) => value == null ? "–" : String(value).replaceAll("_", " ");
  const small = (value) => value == null ? "–" : value === 0 ? "0" : signed(value.toExponential(1));

  const OUTCOMES = { right: "✓ right", wrong: "✗ wrong", unread: "∅ no answer", none: "? no grade" };
  // name, heading, whether a number, how it is written, width
  const COLUMNS = [
    ["step", "step", true, counted, "58px"], ["ticket", "ticket", true, plain, "68px"],
    ["sample", "sample", true, plain, "70px"], ["source", "set", false, text, "minmax(96px, 1fr)"],
    ["fate", "fate", false, words, "86px"], ["verdict", "verdict", false, words, "86px"],
    ["outcome", "graded", false, (value) => OUTCOMES[value], "108px"],
    ["reward", "reward", true, fixed(2), "72px"], ["advantage", "advantage", true, fixed(2), "92px"],
    ["num_tokens", "tokens", true, counted, "72px"], ["finish", "finish", false, words, "70px"],
    ["age", "age", true, plain, "50px"], ["logprob_mean", "log-prob", true, fixed(2), "82px"],
    ["logprob_min", "lowest", true, fixed(2), "76px"], ["gap_max", "gap", true, small, "66px"],
    ["why", "here because", false, text, "minmax(140px, 2fr)"],
  ];
  const HELP = {
    ticket: "The group's serial number in the run", age: "Versions between the weights that sampled its first token and those its step began with",
    fate: "What became of its group", verdict: "Whether its group's answers are all right, all wrong or mixed", advantage: "What it was trained with", gap_max: "The largest |engine log-prob − policy log-prob| of its tokens",
    logprob_mean: "Mean of the engine's log-probs of its tokens", logprob_min: "The engine's log-prob of its least likely token",
    why: "Why this completion was kept for the page",
  };
  const CHOICES = [["source", "set"], ["fate", "fate"], ["verdict", "verdict"], ["outcome", "graded"], ["finish", "finish"], ["why", "here because"]];
  const RANGES = [["step", "step"], ["reward", "reward"], ["num_tokens", "tokens"], ["age", "age"]];

  function toRows(table) {
    const found = [];
    for (let index = 0; index < table.kept; index++) {
      const row = { index };
      for (const name of table.columns) row[name] = table.rows[name][index];
      row.outcome = row.graded === "none" ? "none" : row.correct ? "right" : row.graded === "unread" ? "unread" : "wrong";
      row.reasons = String(row.why).split(", "); // of the completion itself; those beside it have none
      row.text = `${row.source} ${row.fate} ${row.verdict ?? ""} ${row.outcome} ${row.finish} ${row.why}`.toLowerCase();
      found.push(row);
    }
    return found;
  }

  return { toRows, COLUMNS, HELP, OUTCOMES, CHOICES, RANGES, number, plain, words };
})();
