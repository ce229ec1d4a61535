// Before anything is drawn: the theme that was chosen here, if one was.
(() => {
  try {
    const chosen = localStorage.getItem("kvsidecar.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch { /* no storage: the system's theme */ }
})();
