"""The CPU arena: each allocation of a step at its planned address; a prototype that only benches use."""
