"""Recipe schema, pipeline, command line, and the recipes themselves."""
