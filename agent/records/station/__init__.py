"""What people and the station add to the records: second verdicts, the audit, alarms, and pages of stored rows."""
