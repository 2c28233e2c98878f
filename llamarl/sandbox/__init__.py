"""Work that may hang, die or eat memory, in processes that can be killed. No torch."""
