"use strict";

// Looks for a phrase in the prompts, truths and answers of a run: blob after blob, as they are decoded.
const RolloutSearch = (() => {
  const MOST = 40e6; // characters of texts that stay in memory; the others are decoded again

  // Upper and lower case are one, and so is all white space.
  function pattern(phrase) {
    const words = phrase.trim().split(/\s+/).map((word) => word.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&"));
    return new RegExp(words.join("\\s+"), "giu");
  }

  function textOf(blob, one) {
    if (!one.tokens) return one.text;
    const pieces = one.tokens.map((token) => blob.pieces[token]);
    if (one.cut) pieces.splice(one.cut[0], 0, "\n");
    return pieces.join("");
  }

  // The places of a completion's tokens that are part of what is looked for.
  function tokensWith(blob, one, looked) {
    const found = new Set();
    if (!looked || !one.tokens) return found;
    const matches = textOf(blob, one).matchAll(looked);
    let match = matches.next().value, begin = 0;
    for (let at = 0; match && at < one.tokens.length; at++) {
      if (one.cut && at === one.cut[0]) begin++;
      const end = begin + blob.pieces[one.tokens[at]].length;
      while (match && match.index + match[0].length <= begin) match = matches.next().value;
      if (match && match.index < end && begin < end) found.add(at);
      begin = end;
    }
    return found;
  }

  // A text in parts: every second one is what is looked for.
  function parts(text, looked) {
    const found = [];
    let end = 0;
    for (const match of looked ? text.matchAll(looked) : []) {
      found.push(text.slice(end, match.index), match[0]);
      end = match.index + match[0].length;
    }
    return [...found, text.slice(end)];
  }

  function textsOf(blob) {
    return Object.entries(blob.groups).map(([place, group]) => ({
      place: Number(place), shared: [group.prompt, group.truth],
      completions: group.completions.map((one) => [one.sample, textOf(blob, one)]),
    }));
  }

  function matching(groups, looked) {
    return groups.flatMap(({ place, shared, completions }) => {
      const all = shared.some((text) => text.search(looked) >= 0);
      return completions.filter(([, text]) => all || text.search(looked) >= 0).map(([sample]) => [place, sample]);
    });
  }

  function make(openBlob) {
    const kept = new Map(); // id of a blob -> its texts
    let size = 0;

    async function texts(id) {
      if (kept.has(id)) return kept.get(id);
      const groups = textsOf(await openBlob(id));
      const length = groups.flatMap((group) => group.completions).reduce((sum, [, text]) => sum + text.length, 0);
      if (size + length <= MOST) {
        kept.set(id, groups);
        size += length;
      }
      return groups;
    }

    // `tell` gets [place of a group, sample] of what was found in each blob, and the share that is
    // done; it ends the search by returning false.
    return async function search(ids, looked, tell) {
      let rested = performance.now();
      for (const [at, id] of ids.entries()) {
        const found = matching(await texts(id), looked);
        if (performance.now() - rested > 30) {
          await new Promise((done) => setTimeout(done)); // the page goes on meanwhile
          rested = performance.now();
        }
        if (tell(found, (at + 1) / ids.length) === false) return;
      }
    };
  }

  return { make, parts, pattern, tokensWith };
})();
