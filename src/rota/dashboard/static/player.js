// The player is a clock for a journal, with play, pause, speed and a scrubber.

import { find, write } from "./dom.js";
import { Journal } from "./replay.js";

export class Player {
  constructor({ onOpen, onLeave, onTrouble }) {
    Object.assign(this, { onOpen, onTrouble, journal: null, isPlaying: false, at: 0 });
    find("play").addEventListener("click", () => this.play(!this.isPlaying));
    find("leave").addEventListener("click", () => {
      this.journal = null;
      find("player").hidden = true;
      onLeave();
    });
    find("scrub").addEventListener("input", () => {
      const { begin, end } = this.journal;
      this.at = begin + (end - begin) * (find("scrub").value / 1000);
      this.news = true;
    });
    document.addEventListener("keydown", (event) => {
      const isTyping = event.target.closest("input:not([type=range]), select, button, textarea");
      if (!this.journal || event.key !== " " || isTyping) return;
      event.preventDefault();
      this.play(!this.isPlaying);
    });
  }

  open(text, name) {
    try {
      this.journal = new Journal(text);
    } catch (error) {
      return this.onTrouble(`${name}: ${error.message}`);
    }
    this.at = this.journal.begin;
    write(find("journal-name"), name);
    find("player").hidden = false;
    this.play(true);
    this.onOpen();
  }

  play(isPlaying) {
    if (isPlaying && this.at >= this.journal.end) this.at = this.journal.begin;
    this.isPlaying = isPlaying;
    this.tickedAt = performance.now();
    this.news = true;
    write(find("play"), isPlaying ? "❚❚" : "▶");
    find("play").setAttribute("aria-label", isPlaying ? "Pause" : "Play");
  }

  /** The instant of the journal to show now. */
  tick() {
    const now = performance.now();
    if (this.isPlaying) {
      this.at += ((now - this.tickedAt) / 1000) * find("speed").value;
      if (this.at >= this.journal.end) {
        this.at = this.journal.end;
        this.play(false);
      }
    }
    this.tickedAt = now;
    const { begin, end } = this.journal;
    find("scrub").value = end > begin ? (1000 * (this.at - begin)) / (end - begin) : 0;
    write(find("moment"), `${(this.at - begin).toFixed(1)} / ${(end - begin).toFixed(1)} s`);
    return this.at;
  }
}
