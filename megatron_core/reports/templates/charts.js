// Charts of the page: each element of the class "chart" has its curves as JSON in the attribute data-chart.
"use strict";
for (const element of document.querySelectorAll(".chart")) {
  const { x, y, curves, marks } = JSON.parse(element.dataset.chart);
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--soft").trim();
  const line = style.getPropertyValue("--line").trim();
  const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const drawMarks = (plot) => {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = ink;
    ctx.setLineDash([4, 4]);
    for (const [position, text] of marks) {
      const at = plot.valToPos(position, "x", true);
      if (at < bbox.left || at > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillText(text, at + 4, bbox.top + 12);
    }
    ctx.restore();
  };
  const width = () => Math.max(element.clientWidth, 240);
  const plot = new uPlot(
    {
      title: y,
      width: width(),
      height: 240,
      // A position under the pointer is shown in all charts over the same axis.
      cursor: { sync: { key: x } },
      scales: { x: { time: false } },
      axes: [{ ...axis, label: x, labelSize: 20 }, { ...axis, size: 64 }],
      series: [
        { label: x },
        ...curves.map(({ name, colour }) => ({ label: name, stroke: colour, width: 1.5 })),
      ],
      hooks: { draw: [drawMarks] },
    },
    // Curves may have different positions; only values of null are gaps.
    uPlot.join(curves.map(({ points }) => points)),
    element,
  );
  new ResizeObserver(() => plot.setSize({ width: width(), height: 240 })).observe(element);
}
