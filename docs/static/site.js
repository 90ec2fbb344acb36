// Tables and programs that are wider than the page scroll by keys, too.
// The theme's captions are headings without a level.
document.addEventListener("DOMContentLoaded", () => {
  for (const caption of document.querySelectorAll(".caption[role=heading]")) {
    caption.setAttribute("aria-level", "2");
  }
  for (const part of document.querySelectorAll(".table-wrapper, .highlight pre, .sig")) {
    if (part.scrollWidth > part.clientWidth) {
      part.tabIndex = 0;
      part.setAttribute("role", "group");
      part.setAttribute("aria-label", "scrolls sideways");
    }
  }
});
