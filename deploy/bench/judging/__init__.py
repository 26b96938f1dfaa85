"""AutoJudge: which tokens matter to answers that can be checked, and what a judge of them gains."""
