// Diagrams follow the light or dark theme of the page.
let drawing = Promise.resolve();

function draw() {
  const { theme } = document.documentElement.dataset;
  if (theme !== "light" && theme !== "dark") return; // not decided yet: no colours
  const style = getComputedStyle(document.body);
  const color = (name) => style.getPropertyValue(`--pst-color-${name}`).trim();
  const diagrams = [...document.querySelectorAll("pre.mermaid")];
  for (const diagram of diagrams) {
    diagram.dataset.source ??= diagram.textContent;
    diagram.textContent = diagram.dataset.source;
    delete diagram.dataset.processed;
  }
  mermaid.initialize({
    startOnLoad: false,
    securityLevel: "strict",
    theme: "base",
    themeVariables: {
      background: color("background"),
      primaryColor: color("surface"),
      primaryTextColor: color("text-base"),
      primaryBorderColor: color("text-muted"),
      lineColor: color("text-muted"),
      textColor: color("text-base"),
      edgeLabelBackground: color("background"),
      tertiaryColor: color("background"),
      tertiaryTextColor: color("text-base"),
      tertiaryBorderColor: color("border"),
      fontFamily: style.fontFamily,
    },
    flowchart: { wrappingWidth: 400 },
  });
  return mermaid.run({ nodes: diagrams });
}

if (document.querySelector("pre.mermaid")) {
  const again = () => { drawing = drawing.then(draw).catch(console.error); };
  again();
  new MutationObserver(again).observe(document.documentElement, {
    attributes: true,
    attributeFilter: ["data-theme"],
  });
}

// The theme's search is named by what it says, and its side bar is a landmark.
for (const button of document.querySelectorAll(".search-button-field")) {
  button.removeAttribute("aria-label");
}
const pages = document.getElementById("pst-primary-sidebar");
pages?.setAttribute("role", "navigation");
pages?.setAttribute("aria-label", "Pages");

