{% include "points.js" %}
  const isDrawn = data.edge && data.edge <= 1.15 * data.plain.bytes; // a budget further right is told in words
  const most = Math.max(data.plain.bytes, ...data.budget, isDrawn ? data.edge : 0);
  const [byteUnit, byteSize] = units(most, byteUnits);
  const slowest = Math.max(data.plain.seconds, ...data.seconds);
  const fastest = Math.min(data.narrowest * slowest, ...data.bound); // small differences stay small
  const [timeUnit, timeSize] = units(slowest, timeUnits);
  const inBytes = (values) => values.map((value) => value / byteSize);
  const inTime = (values) => values.map((value) => value / timeSize);
  const least = Math.min(data.budget[0], isDrawn ? data.edge : most);
  const room = most - least || most;
  const high = slowest - fastest || slowest || 1;
  const up = [Math.max(0, fastest - 0.12 * high) / timeSize, (slowest + 0.1 * high) / timeSize];
  const across = {
    range: [Math.max(0, least - 0.06 * room) / byteSize, (most + 0.05 * room) / byteSize],
    title: { text: `budget, ${byteUnit}`, standoff: 8 },
  };
  const edge = isDrawn ? data.edge / byteSize : null;

  function drawPoints(element) {
    const x = inBytes(data.budget);
    const y = inTime(data.seconds);
    const about = (i) => [`<b>${data.size[i]}</b>, peak ${data.peak[i]}`, `step ${data.added[i]} of plain`, data.variant[i]];
    const traces = [
      ...bound(x, inTime(data.bound), up[0]), // from the floor of the chart
      plans(x, y, "hv"),
      plain([data.plain.bytes / byteSize], [data.plain.seconds / timeSize], "<b>plain PyTorch</b>"),
      points(x, y, 11, about, `%{y:.4~g} ${timeUnit}`),
    ];
    return Plotly.react(element, traces, { ...panel(element, across, edge), yaxis: { ...line(), range: up, ticksuffix: ` ${timeUnit}`, nticks: 7 } }, config);
  }

  function drawUses(element) {
    const gaps = data.budget.slice(1).map((budget, i) => budget - data.budget[i]);
    const width = (0.72 * (gaps.length ? Math.max(Math.min(...gaps), 0.02 * room) : 0.1 * room)) / byteSize;
    const traces = bars(inBytes(data.budget), inBytes, (name) => `${name} %{y:.4~g} ${byteUnit}`, { width });
    return Plotly.react(element, traces, { ...panel(element, across, edge), barmode: "stack", yaxis: { ...line(), ticksuffix: ` ${byteUnit}`, nticks: 5, rangemode: "tozero" } }, config);
  }
