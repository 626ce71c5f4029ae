"""The kinds of data: one file each, all behind `reconv.data.source.Source`."""
