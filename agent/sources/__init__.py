"""Where the subjects of a line come from: folders, cameras, and what a start finds in the journal."""
