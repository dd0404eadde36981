// Each adapter has one colour in all pictures; the theme follows the system until the user chooses one.

import { make } from "./dom.js";

const HUES = [252, 52, 155, 335, 95, 298, 205, 20];
const dark = matchMedia("(prefers-color-scheme: dark)");
const ORDER = ["auto", "light", "dark"];

export const theme = {
  get chosen() {
    return localStorage.getItem("rota-theme") ?? "auto";
  },
  get isDark() {
    return this.chosen === "auto" ? dark.matches : this.chosen === "dark";
  },
  apply(button, onChange) {
    const show = () => {
      document.documentElement.dataset.theme = this.chosen;
      const [sign, word] = { auto: ["◐", "Auto"], light: ["○", "Light"], dark: ["●", "Dark"] }[this.chosen];
      button.replaceChildren(sign, make("span", "", word));
      button.setAttribute("aria-label", `Colours: ${word}`);
      onChange();
    };
    button.addEventListener("click", () => {
      localStorage.setItem("rota-theme", ORDER[(ORDER.indexOf(this.chosen) + 1) % ORDER.length]);
      show();
    });
    dark.addEventListener("change", show);
    show();
  },
};

/** Neighbours differ in hue, and every second one in lightness. After eight, hues are a golden angle apart. */
export function colour(adapter) {
  const lightness = theme.isDark ? 0.74 : 0.6;
  if (adapter === 0) return `oklch(${lightness} 0.012 250)`;
  const index = adapter - 1;
  const hue = index < HUES.length ? HUES[index] : (index * 137.508) % 360;
  return `oklch(${lightness + (index % 2 ? 0.05 : -0.02)} 0.125 ${hue})`;
}
