"""What a step is: graphs of bodies over lanes, how they are checked, shown and run."""
