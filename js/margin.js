// The room around the plot's lines, in pixels: axes, strips and bands keep to it.

export const MARGIN = { l: 70, r: 14, t: 6, b: 26 };
