"""Host lists, slots, addresses and the allocations of batch schedulers."""
