"""The long-running agent: takes images in, decides, runs experts, keeps verdicts."""
