"""The offline commands: profile, plan, bench."""
