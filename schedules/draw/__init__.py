"""Programs and timelines as text, SVG, HTML and traces."""
