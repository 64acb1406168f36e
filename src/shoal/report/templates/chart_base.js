const data = JSON.parse(document.getElementById("data").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const byteUnits = [["B", 1], ["KiB", 2 ** 10], ["MiB", 2 ** 20], ["GiB", 2 ** 30], ["TiB", 2 ** 40]];
  const timeUnits = [["µs", 1e-6], ["ms", 1e-3], ["s", 1]];
  const units = (largest, steps) => steps.findLast(([, size]) => largest >= size) ?? steps[0];

  const line = () => ({ gridcolor: colour("rule"), linecolor: colour("rule"), zeroline: false, automargin: true, color: colour("soft") });
  const family = getComputedStyle(document.body).fontFamily;
  const base = (size, margin) => ({
    ...size,
    margin,
    paper_bgcolor: colour("card"),
    plot_bgcolor: colour("card"),
    showlegend: false,
    dragmode: false,
    font: { family, size: 12.5, color: colour("soft") },
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("rule"), align: "left", font: { family, color: colour("text"), size: 12.5 } },
  });
  const sizeOf = (element) => ({ width: element.clientWidth, height: element.clientHeight });
  const config = { displaylogo: false, displayModeBar: false };
