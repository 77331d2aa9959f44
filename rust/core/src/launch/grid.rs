//! Geometry of a launch.

/// Launch geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Thread blocks.
    pub blocks: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, bytes; at most what the kernel's instance was loaded with.
    pub shared_bytes: u32,
    /// Blocks of a cluster, which divides `blocks[0]`; 1 for a launch without clusters.
    pub cluster: u32,
}

impl Grid {
    /// A one-dimensional grid without dynamic shared memory.
    #[must_use]
    pub const fn linear(blocks: u32, threads: u32) -> Self {
        Self { blocks: [blocks, 1, 1], threads, shared_bytes: 0, cluster: 1 }
    }

    /// The same with dynamic shared memory.
    #[must_use]
    pub const fn with_shared(mut self, bytes: u32) -> Self {
        self.shared_bytes = bytes;
        self
    }

    /// The same in clusters of `blocks` blocks.
    #[must_use]
    pub const fn with_cluster(mut self, blocks: u32) -> Self {
        self.cluster = blocks;
        self
    }

    /// Whether there is nothing to launch.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.blocks[0] == 0 || self.blocks[1] == 0 || self.blocks[2] == 0
    }
}
