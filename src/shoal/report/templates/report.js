const step = data.memory;
  const moments = step.start.length;
  const categories = Object.keys(step.bytes);
  const totals = step.start.map((_, i) => categories.reduce((sum, name) => sum + step.bytes[name][i], 0));
  const narrow = matchMedia("(max-width: 720px)");
  const touch = matchMedia("(pointer: coarse)");
  let onPaper = false;

  // Plotly reads markup in texts; names of ops and layers are shown as they are.
  const plainText = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const text = (column, i) => plainText(step.texts[step[column][i]]);

  const speedUnits = [["B/s", 1], ["kB/s", 1e3], ["MB/s", 1e6], ["GB/s", 1e9]]; // powers of ten, the unit of data sheets
  const show = (value, steps) => {
    const [unit, size] = units(Math.abs(value), steps);
    const scaled = value / size;
    return `${scaled.toFixed(unit === "B" || scaled >= 100 ? 0 : scaled >= 10 ? 1 : 2)} ${unit}`;
  };
  const showBytes = (value) => show(value, byteUnits);
  const showTime = (value) => (value ? show(value, timeUnits) : "0 s");

  const plainPeak = data.plain ? data.plain.bytes.reduce((a, b) => Math.max(a, b)) : 0;
  const top = Math.max(step.budget, totals[step.peak], plainPeak);
  const [byteUnit, byteSize] = units(top, byteUnits);
  const [timeUnit, timeSize] = units(step.end, timeUnits);
  const waits = step.phase.map((place) => ["stall", "launch"].includes(step.texts[place]));
  const opNumber = []; // waits are no ops
  waits.reduce((count, wait, i) => (opNumber[i] = count + (wait ? 0 : 1)), 0);
  const ops = opNumber[moments - 1];
  const inUnit = (values) => values.map((value) => value / byteSize);

  function hoverText(i) {
    const swatch = (name) => `<span style="color:${colour(name)}">■</span>`;
    const parts = categories
      .filter((name) => step.bytes[name][i] > 0)
      .reverse()
      .map((name) => `${swatch(name)} ${name.replace("-", " ")} ${showBytes(step.bytes[name][i])}`);
    const layer = text("layer", i);
    if (waits[i]) {
      const launches = text("phase", i) === "launch";
      return [
        `<b>${launches ? "wait" : "stall"} of ${showTime(step.seconds[i])}</b>`,
        launches ? `until the host has launched ${text("op", i)}` : `waiting for the copy of ${text("op", i)}`,
        `at ${text("target", i)}${layer ? ` of ${layer}` : ""}`,
        `<b>${showBytes(totals[i])} in use</b>`,
        ...parts,
      ].join("<br>");
    }
    return [
      `<b>${text("op", i)}</b>`,
      `${layer ? `${layer}, ` : ""}${text("phase", i)}`,
      text("target", i),
      `${showTime(step.seconds[i])}, op ${opNumber[i]} of ${ops}`,
      `<b>${showBytes(totals[i])} in use</b>`,
      ...parts,
    ].join("<br>");
  }

  // Steps hold their height until the next op, so the last op's height is written twice.
  const held = (values) => [...values, values[values.length - 1]];

  function memoryFigure(axis) {
    const byTime = axis === "time";
    const edges = byTime ? [...step.start, step.end].map((t) => t / timeSize) : [...step.start.keys(), moments];
    const end = edges[moments] || 1;
    const room = ((totals[step.peak] > 0.8 * top ? 1.28 : 1.12) * top) / byteSize || 1; // for the words at the peak
    const widths = step.start.map((_, i) => edges[i + 1] - edges[i]);
    const areas = categories.map((name) => ({
      name,
      x: edges,
      y: held(inUnit(step.bytes[name])),
      stackgroup: "bytes",
      fillcolor: colour(name),
      line: { shape: "hv", width: 0 },
      hoverinfo: "skip",
    }));
    const outline = {
      x: edges,
      y: held(inUnit(totals)),
      mode: "lines",
      line: { shape: "hv", width: 1, color: colour("text") },
      opacity: 0.55,
      hoverinfo: "skip",
    };
    // The hover belongs to invisible bars as wide as their ops: the pointer always names the op it is over.
    const pointer = {
      type: "bar",
      x: edges.slice(0, moments),
      y: inUnit(totals),
      width: widths,
      offset: 0,
      marker: { color: "rgba(0,0,0,0)", line: { width: 0 } },
      hovertext: step.start.map((_, i) => hoverText(i)),
      hovertemplate: "%{hovertext}<extra></extra>",
    };
    const traces = [...areas, outline, pointer];
    if (data.plain) {
      const plainEdges = byTime
        ? [...data.plain.start, data.plain.end].map((t) => t / timeSize)
        : [...data.plain.at, moments];
      traces.push({
        x: plainEdges,
        y: held(inUnit(data.plain.bytes)),
        mode: "lines",
        line: { shape: "hv", width: 1.3, color: colour("plain") },
        hoverinfo: "skip",
      });
    }
    // A strip under the chart shows which pass runs.
    const passes = { forward: "kept", loss: "gradients", recompute: "recomputed", backward: "activation-gradients" };
    for (const [phase, paint] of Object.entries(passes)) {
      const runs = step.phase.map((place) => (step.texts[place] === phase ? 1 : 0));
      traces.push({
        x: edges,
        y: held(runs),
        yaxis: "y2",
        fill: "tozeroy",
        fillcolor: colour(paint),
        line: { shape: "hv", width: 0 },
        mode: "lines",
        hoverinfo: "skip",
      });
    }

    if (waits.includes(true)) {
      // Bars with an edge: a wait far shorter than a pixel is seen too.
      const stalls = (yaxis, height, opacity) => {
        const at = waits.flatMap((wait, i) => (wait ? [i] : []));
        traces.push({
          type: "bar",
          x: at.map((i) => edges[i]),
          y: at.map(() => height),
          width: at.map((i) => widths[i]),
          offset: 0,
          yaxis,
          marker: { color: colour("stall"), line: { width: 1, color: colour("stall") } },
          opacity,
          hoverinfo: "skip",
        });
      };
      stalls("y", room, 0.28);
      stalls("y2", 1, 1);
    }
    const chart = document.getElementById("memory-chart");
    const linked = data.link ? lanes(size(chart, 680, 400).height, edges, byTime) : undefined;
    if (linked) traces.push(...linked.traces);

    const boundary = step.phase.findIndex((place) => !["forward", "stall", "launch"].includes(step.texts[place]));
    const shapes = [];
    const annotations = [];
    const note = (more) =>
      annotations.push({ showarrow: false, font: { size: 12, color: colour("soft") }, ...more });
    if (boundary > 0) {
      const x = edges[boundary];
      shapes.push({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { width: 1, dash: "dot", color: colour("soft") } });
      note({ x, yref: "paper", y: 1, text: "forward", xshift: -6, xanchor: "right", yanchor: "bottom" });
      note({ x, yref: "paper", y: 1, text: "backward", xshift: 6, xanchor: "left", yanchor: "bottom" });
    }
    if (step.budget) {
      const y = step.budget / byteSize;
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line: { width: 2, dash: "dash", color: colour("budget") } });
      note({ xref: "paper", x: 0, xshift: 4, y, text: `budget ${showBytes(step.budget)}`, xanchor: "left", yanchor: "bottom", font: { size: 12, color: colour("budget") } });
    }
    if (data.plain) {
      const highest = data.plain.bytes.indexOf(plainPeak);
      const x = byTime ? data.plain.start[highest] / timeSize : data.plain.at[highest];
      if (plainPeak > 1.1 * totals[step.peak]) {
        note({ x, y: plainPeak / byteSize, text: `${data.plain.name} ${showBytes(plainPeak)}`, xanchor: x < end / 2 ? "left" : "right", yanchor: "bottom" });
      }
    }
    const peakX = (edges[step.peak] + edges[step.peak + 1]) / 2;
    const onLeft = peakX < end / 2;
    const where = text("layer", step.peak) || text("op", step.peak);
    annotations.push({
      x: peakX,
      y: totals[step.peak] / byteSize,
      text: `<b>peak ${showBytes(totals[step.peak])}</b>${narrow.matches ? "" : `<br>${where}, ${text("phase", step.peak)}`}`,
      font: { size: 12, color: colour("text") },
      align: "left",
      bgcolor: colour("card"),
      opacity: 0.95,
      borderpad: 4,
      arrowcolor: colour("text"),
      arrowwidth: 1,
      arrowhead: 0,
      standoff: 2,
      ax: onLeft ? 40 : -40,
      ay: -42,
      xanchor: onLeft ? "left" : "right",
    });

    const layout = {
      ...base(size(chart, 680, linked ? 400 : 330), { l: 8, r: 8, t: 26, b: 8 }),
      hovermode: "x",
      hoverdistance: -1,
      bargap: 0,
      dragmode: touch.matches ? false : "zoom",
      shapes,
      annotations,
      xaxis: {
        ...line(),
        range: [0, end],
        anchor: linked ? linked.lowest : "y2",
        showgrid: false,
        title: { text: byTime ? `time (${timeUnit})` : waits.includes(true) ? "op or wait, in the order of execution" : "op, in the order of execution", standoff: 6 },
        nticks: narrow.matches ? 5 : 10,
        showspikes: true,
        spikemode: "across",
        spikesnap: "hovered data",
        spikethickness: 1,
        spikedash: "solid",
        spikecolor: colour("soft"),
      },
      yaxis: {
        ...line(),
        domain: [linked ? linked.top + 0.05 : 0.05, 1],
        range: [0, room],
        fixedrange: true,
        nticks: 6,
        title: { text: `in use (${byteUnit})`, standoff: 8 },
      },
      yaxis2: {
        domain: linked ? [linked.top, linked.top + 0.025] : [0, 0.025],
        range: [0, 1],
        fixedrange: true,
        visible: false,
      },
      ...(linked ? linked.axes : {}),
    };
    if (linked) linked.names.forEach(note);
    return { traces, layout };
  }

  // A lane for each direction of the link, under the strip and on the same axis: a bar for each copy, and one for each
  // time in between, so that the pointer never names a copy that is not there.
  function lanes(height, edges, byTime) {
    const place = byTime ? (t) => t / timeSize : (t) => {
      let i = step.start.findLastIndex((start) => start <= t);
      i = Math.max(i, 0);
      const seconds = step.seconds[i];
      return i + (seconds ? Math.min((t - step.start[i]) / seconds, 1) : 0);
    };
    const pixel = 1 / (height - 80); // about what the margins and the axis leave
    const paint = { "to host": "kept", "to device": "fetched" };
    const drawn = { traces: [], axes: {}, names: [], lowest: "", top: 0 };
    let floor = 0;
    [...data.link].reverse().forEach((lane, n) => {
      const axis = `y${3 + n}`;
      drawn.lowest ||= axis;
      const bars = [];
      let now = 0;
      const idle = (until) => { // times are rounded to nanoseconds
        if (until - now > 2e-9) bars.push([now, until, "page", `<b>${lane.way}</b><br>idle for ${showTime(until - now)}`]);
      };
      lane.start.forEach((start, i) => {
        const end = start + lane.seconds[i];
        idle(start);
        const layer = plainText(lane.layer[i]);
        const words = [
          `<b>${plainText(lane.storage[i])} ${lane.way}</b>`,
          ...(layer ? [layer] : []),
          showBytes(lane.bytes[i]),
          `${showTime(lane.seconds[i])}${lane.seconds[i] ? ` at ${show(lane.bytes[i] / lane.seconds[i], speedUnits)}` : ""}`,
          `copy ${i + 1} of ${lane.start.length}`,
        ];
        bars.push([start, end, paint[lane.way], words.join("<br>")]);
        now = end;
      });
      idle(step.end);
      const colours = { page: colour("page"), [paint[lane.way]]: colour(paint[lane.way]) };
      const starts = bars.map(([start]) => place(start));
      let copies = 0;
      drawn.traces.push({
        type: "bar",
        x: starts,
        y: bars.map(() => 1),
        width: bars.map(([, end], i) => place(end) - starts[i]),
        offset: 0,
        yaxis: axis,
        // Two shades by turns: copies that follow each other at once stay two.
        marker: {
          color: bars.map((bar) => colours[bar[2]]),
          opacity: bars.map((bar) => (bar[2] === "page" || copies++ % 2 ? 1 : 0.72)),
          line: { width: 0 },
        },
        hovertext: bars.map((bar) => bar[3]),
        hovertemplate: "%{hovertext}<extra></extra>",
      });
      const top = floor + 14 * pixel;
      drawn.axes[`yaxis${3 + n}`] = { domain: [floor, top], range: [0, 1], fixedrange: true, visible: false };
      drawn.names.push({ xref: "paper", x: 0, yref: "paper", y: top, text: `${lane.way}: ${lane.summary}`, xanchor: "left", yanchor: "bottom", bgcolor: colour("card") });
      floor = top + 24 * pixel;
    });
    drawn.top = floor;
    return drawn;
  }

  // On paper nothing tells a chart how wide it is; the widths given here fit A4 and Letter.
  const size = (element, width, height) =>
    onPaper ? { width, height } : sizeOf(element);

  function curve(id, x, y, title, suffix, axisTitle) {
    const element = document.getElementById(id);
    if (!element) return undefined;
    const shown = y.length > 60 ? "lines" : "lines+markers";
    const trace = {
      x,
      y,
      mode: shown,
      connectgaps: false,
      line: { color: colour("kept"), width: 1.8 },
      marker: { size: 6, color: colour("kept") },
      hovertemplate: `${axisTitle} %{x}<br>${title} <b>%{y:.4~g}${suffix}</b><extra></extra>`,
    };
    return Plotly.react(element, [trace], {
      ...base(size(element, 325, 210), { l: 8, r: 12, t: 30, b: 8 }),
      title: { text: title, x: 0, xanchor: "left", xref: "paper", yref: "container", y: 0.97, font: { size: 13.5, color: colour("text") } },
      xaxis: { ...line(), showgrid: false, title: { text: axisTitle, standoff: 6 }, nticks: 6, ...(x.length < 6 ? { dtick: 1 } : {}) },
      yaxis: { ...line(), ticksuffix: suffix, nticks: 5, rangemode: suffix ? "normal" : "tozero" },
    }, config);
  }

  function draw() {
    document.documentElement.classList.toggle("printing", onPaper);
    const axis = document.querySelector("input[name=axis]:checked").value;
    const { traces, layout } = memoryFigure(axis);
    const accuracies = data.accuracies.map((share) => (share === null ? null : 100 * share));
    return Promise.all([
      Plotly.react("memory-chart", traces, layout, config),
      curve("loss-chart", data.losses.step, data.losses.loss, "Loss", "", "training step"),
      curve("accuracy-chart", [...accuracies.keys()].map((i) => i + 1), accuracies, "Accuracy", " %", "evaluation"),
    ]);
  }

  if (!step.end) {
    // Ops without times: only their order can be drawn.
    document.querySelector("input[value=op]").checked = true;
    document.querySelector("input[value=time]").disabled = true;
  }
  for (const input of document.querySelectorAll("input[name=axis]")) input.addEventListener("change", redraw);
  const print = (paper) => () => {
    onPaper = paper;
    redraw();
  };
  addEventListener("beforeprint", print(true));
  addEventListener("afterprint", print(false));
