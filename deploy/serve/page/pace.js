// How fast tokens come, by this browser's clock.

const WINDOW = 1000; // milliseconds that "now" is
const SHORTEST = 150; // before that a rate means nothing

export class Pace {
  arrivals = []; // [time, number of tokens]

  count(number) {
    if (number) this.arrivals.push([performance.now(), number]);
  }

  now() {
    const from = performance.now() - WINDOW;
    const first = this.arrivals.findIndex(([time]) => time >= from);
    return first < 0 ? 0 : rateOf(this.arrivals.slice(Math.max(0, first - 1)));
  }

  overall() {
    return rateOf(this.arrivals);
  }
}

// Tokens a second from the first arrival on, whose own tokens took the time before it.
function rateOf(arrivals) {
  const milliseconds = arrivals.length ? arrivals.at(-1)[0] - arrivals[0][0] : 0;
  if (milliseconds < SHORTEST) return 0;
  return (1000 * arrivals.slice(1).reduce((sum, [, number]) => sum + number, 0)) / milliseconds;
}
