for (const chart of document.querySelectorAll('svg.chart[data-hover]')) {
  const card = chart.parentElement, cursor = chart.querySelector('.cursor');
  const { x: [left, right, low, high], log, across, series } = JSON.parse(chart.dataset.hover);
  const place = step => log ? Math.log10(Math.abs(step)) : step;
  const start = place(low), length = place(high) - start;
  const tip = document.createElement('div');
  tip.className = 'tip';
  tip.hidden = true;
  card.append(tip);
  const nearest = (steps, wanted) => {
    const distances = steps.map(step => Math.abs(place(step) - wanted));
    return distances.indexOf(Math.min(...distances));
  };
  chart.addEventListener('pointermove', event => {
    const box = chart.getBoundingClientRect(), scale = chart.viewBox.baseVal.width / box.width;
    const share = ((event.clientX - box.left) * scale - left) / (right - left);
    const wanted = start + Math.min(1, Math.max(0, share)) * length;
    const points = series.map(s => ({ label: s.label, i: nearest(s.steps, wanted), s }));
    const steps = points.map(f => f.s.steps[f.i]);
    const step = steps[nearest(steps, wanted)];
    const x = left + (place(step) - start) / length * (right - left);
    cursor.setAttribute('x1', x);
    cursor.setAttribute('x2', x);
    cursor.setAttribute('visibility', 'visible');
    tip.replaceChildren();
    const head = document.createElement('div');
    head.textContent = across + ' ' + step;
    tip.append(head);
    for (const f of points) {
      if (f.s.steps[f.i] !== step) continue;
      const row = document.createElement('div');
      row.textContent = (series.length > 1 ? f.label + ': ' : '') + f.s.values[f.i];
      tip.append(row);
    }
    tip.hidden = false;
    const room = card.getBoundingClientRect(), beside = event.clientX - room.left + 14;
    tip.style.left = Math.max(4, Math.min(beside, room.width - tip.offsetWidth - 4)) + 'px';
    tip.style.top = event.clientY - room.top - tip.offsetHeight - 10 + 'px';
  });
  chart.addEventListener('pointerleave', () => {
    tip.hidden = true;
    cursor.setAttribute('visibility', 'hidden');
  });
}
