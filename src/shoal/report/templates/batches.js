{% include "points.js" %}
  const last = data.batch[data.batch.length - 1];
  const most = data.edge ?? last;
  const fastest = Math.max(...data.bound);
  const slowest = Math.min(data.narrowest * fastest, ...data.rate, ...data.plain.filter((rate) => rate !== null));
  const high = fastest - slowest || fastest || 1;
  const up = [Math.max(0, slowest - 0.1 * high), fastest + 0.1 * high];
  const roundStep = (step) => [1, 2, 5, 10].map((factor) => factor * 10 ** Math.floor(Math.log10(step))).find((round) => round >= step);
  const across = {
    range: [Math.max(0, data.batch[0] - 0.06 * most), 1.05 * most],
    title: { text: "images in a step", standoff: 8 },
    tick0: 0,
    dtick: Math.max(1, roundStep(most / 8)),
  };

  function drawPoints(element) {
    const x = data.batch;
    const fitting = data.plain.findLastIndex((rate) => rate !== null) + 1;
    const [plainX, plainY] = [x.slice(0, fitting), data.plain.slice(0, fitting)];
    const about = (i) => [`<b>${x[i]} images</b>${i === data.best ? ", the best" : ""}`, `step ${data.step[i]}, peak ${data.peak[i]}`, data.variant[i]];
    const traces = [
      ...bound(x, data.bound, up[1]), // up to the ceiling of the chart
      { x: plainX, y: plainY, mode: "lines", line: { color: colour("soft"), width: 1.4, dash: "dot" }, hoverinfo: "skip" },
      plans(x, data.rate, "linear"),
      plain(plainX.slice(-1), plainY.slice(-1), "<b>plain PyTorch</b>, %{x} images<br>%{y:.4~g} images/s"),
      points(x, data.rate, x.map((_, i) => (i === data.best ? 15 : 10)), about, "%{y:.4~g} images/s"),
    ];
    return Plotly.react(element, traces, { ...panel(element, across, data.edge), yaxis: { ...line(), range: up, title: { text: "images/s", standoff: 8 }, nticks: 7 } }, config);
  }

  function drawUses(element) {
    // As wide as half way to the neighbours, so that close batches do not hide each other.
    const edges = data.batch.map((batch, i) => (i ? (data.batch[i - 1] + batch) / 2 : batch - 0.5)).concat([last + 0.5]);
    const middles = data.batch.map((_, i) => (edges[i] + edges[i + 1]) / 2);
    const width = data.batch.map((_, i) => edges[i + 1] - edges[i]);
    const traces = bars(middles, (percent) => percent, (name) => `%{customdata} images: ${name} %{y:.3~g} %`, { width, customdata: data.batch });
    return Plotly.react(element, traces, { ...panel(element, across, data.edge), barmode: "stack", yaxis: { ...line(), ticksuffix: " %", nticks: 5, range: [0, 100] } }, config);
  }
