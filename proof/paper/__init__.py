"""The paper's tasks, devices, systems, ablations and figures, simulated (CoServe, section 5)."""
