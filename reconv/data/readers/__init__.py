"""The kinds of data: one file each, all behind `reconv.data.dataset.Dataset`."""
