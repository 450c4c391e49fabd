"""Records of a line: journal, verdicts, boards, attempts, exports and messages to receivers."""
