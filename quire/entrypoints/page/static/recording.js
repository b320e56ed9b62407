// The last minute of the view, to save and to play again. It holds what the stream holds: numbers, no texts.

import { applyStates } from "./blockmap.js";

export const SECONDS = 60;
const FORMAT = "quire-view";

export class Recorder {
  constructor() {
    this.samples = [];
    this.base = null; // the block map before the first sample
  }

  add(sample) {
    if (this.base?.length !== sample.blocks.total) {
      this.base = new Uint8Array(sample.blocks.total);
      this.samples = [];
    }
    this.samples.push(sample);
    while (sample.time - this.samples[0].time > SECONDS) {
      const { blocks } = this.samples.shift();
      applyStates(this.base, blocks.first, blocks.states);
    }
  }

  async save(info) {
    const base = [];
    for (let at = 0; at < this.base.length;) {
      let end = at;
      while (end < this.base.length && this.base[end] === this.base[at]) end++;
      base.push(this.base[at], end - at);
      at = end;
    }
    const { version, models, max_model_len, max_num_seqs } = info;
    const text = JSON.stringify({ format: FORMAT, version: 1, server: { version, models, max_model_len, max_num_seqs }, base, samples: this.samples });
    const packed = new Blob([text]).stream().pipeThrough(new CompressionStream("gzip"));
    return new Response(packed).blob();
  }
}

export async function readRecording(blob) {
  const head = new Uint8Array(await blob.slice(0, 2).arrayBuffer());
  const packed = head[0] === 0x1f && head[1] === 0x8b;
  const text = await new Response(packed ? blob.stream().pipeThrough(new DecompressionStream("gzip")) : blob).text();
  let recording = null;
  try {
    recording = JSON.parse(text);
  } catch { /* said below */ }
  if (recording?.format !== FORMAT || recording.version !== 1 || !Array.isArray(recording.samples) || !recording.samples.length) throw new Error("This file is not a recording of the live view.");
  const first = recording.samples[0];
  first.blocks = { ...first.blocks };
  const map = new Uint8Array(first.blocks.total);
  applyStates(map, 0, recording.base ?? []);
  recording.map = map;
  return recording;
}
