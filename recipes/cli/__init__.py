"""The command line: `polybasic`. Imports no model code until a command needs it."""
