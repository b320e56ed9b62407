// Moving plots of the last seconds, on canvas: steps as stacked bars, and a line of how long each took.

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function fit(canvas) {
  const scale = Math.min(3, devicePixelRatio || 1);
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

export function niceMax(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 5, 7.5, 10].map((m) => m * power).find((m) => m >= value);
}

function grid(context, width, height) {
  context.strokeStyle = color("--line");
  context.lineWidth = 1;
  context.beginPath();
  for (const part of [0.5, height / 2, height - 0.5]) {
    context.moveTo(0, Math.round(part) + 0.5);
    context.lineTo(width, Math.round(part) + 0.5);
  }
  context.stroke();
}

// steps: {time, seconds, parts: [prefill, decode, drafts]}, oldest first. Returns the top of the scale.
export function drawTokens(canvas, steps, now, span) {
  const { context, width, height } = fit(canvas);
  grid(context, width, height);
  const top = niceMax(Math.max(1, ...steps.map((step) => step.parts[0] + step.parts[1] + step.parts[2])));
  const colors = [color("--prefill"), color("--decode"), color("--draft")];
  const x = (time) => width * (1 - (now - time) / span);
  for (const [i, step] of steps.entries()) {
    const right = x(step.time);
    const left = Math.max(x(step.time - step.seconds), i ? x(steps[i - 1].time) : -10);
    const wide = Math.max(1, right - left - (right - left > 3 ? 1 : 0));
    let bottom = height;
    for (const kind of [1, 2, 0]) {
      const tall = height * step.parts[kind] / top;
      if (!tall) continue;
      context.fillStyle = colors[kind];
      context.fillRect(left, bottom - tall, wide, tall);
      bottom -= tall;
    }
  }
  return top;
}

export function drawTimes(canvas, steps, now, span) {
  const { context, width, height } = fit(canvas);
  grid(context, width, height);
  const top = niceMax(Math.max(0.001, ...steps.map((step) => step.seconds)));
  const x = (time) => width * (1 - (now - time) / span);
  const y = (seconds) => height - 1 - (height - 3) * seconds / top;
  context.strokeStyle = color("--ink");
  context.lineWidth = 1.25;
  context.lineJoin = "round";
  context.beginPath();
  let before = -Infinity;
  for (const step of steps) {
    const apart = step.time - before > step.seconds + 0.5; // idle in between
    if (apart) context.moveTo(x(step.time - step.seconds), y(step.seconds));
    context.lineTo(x(step.time), y(step.seconds));
    before = step.time;
  }
  context.stroke();
  return top;
}
