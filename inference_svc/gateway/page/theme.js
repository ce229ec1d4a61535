// Applies the chosen theme before the first paint.
(() => {
  try {
    const chosen = localStorage.getItem("kvsidecar.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch { /* no storage: the system's theme */ }
})();
