"""The decoder layers of a step of few tokens as one persistent kernel, whose programs wait for each other in global memory."""
