"""The runtime as a measuring instrument: times, footprints and workspaces over the path that the agent takes."""
