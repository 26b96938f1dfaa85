"""A benchmark's report for people: in the terminal, as Markdown and as a page."""
