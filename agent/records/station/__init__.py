"""Records that people and the station add: second verdicts, the audit, alarms, and pages of stored rows."""
