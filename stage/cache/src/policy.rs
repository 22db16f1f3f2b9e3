//! At which lengths of a prompt an exact state is worth its bytes.

/// A state can be restored at its own length only. So states are taken where other prompts are likely to have it: on a grid, some
/// way before the end of the prompt, and where prompts were seen to part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checkpoints {
    /// Prompts of no more tokens have no shared checkpoint.
    pub min_tokens: usize,
    /// Distance of grid points, in tokens.
    pub stride: usize,
    /// States of one prompt at most.
    pub max_records: usize,
}

impl Checkpoints {
    /// The grid point that other prompts probably have in common with one of `prompt` tokens: the last but one on the grid.
    #[must_use]
    pub fn shared(&self, prompt: usize) -> Option<usize> {
        if prompt <= self.min_tokens {
            return None;
        }
        let stride = self.stride.max(1);
        let point = (prompt / stride * stride).saturating_sub(stride).max(self.min_tokens);
        (0 < point && point < prompt).then_some(point)
    }

    /// Lengths at which states of a prompt are taken, ascending. The shared checkpoint alone, or the whole prompt where it has
    /// none; besides, the point where it parts from an earlier prompt (`branch` tokens in common, 0: none) and others may part
    /// again. Nothing at or before `restored`, which is there.
    #[must_use]
    pub fn plan(&self, prompt: usize, restored: usize, branch: usize) -> Vec<usize> {
        let shared = self.shared(prompt).unwrap_or(prompt);
        let far = branch >= self.min_tokens.max(1) && branch >= restored.saturating_add(self.stride);
        let branch = (far && branch < prompt && branch != shared).then_some(branch);
        let mut points: Vec<_> = [Some(shared).filter(|s| *s > restored), branch].into_iter().flatten().collect();
        points.truncate(self.max_records);
        points.sort_unstable();
        points
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: Checkpoints = Checkpoints { min_tokens: 256, stride: 128, max_records: 2 };

    #[test]
    fn shared_checkpoints_stand_one_stride_back_on_the_grid() {
        assert_eq!(POLICY.shared(2214), Some(2048));
        assert_eq!(POLICY.shared(970), Some(768));
        assert_eq!(POLICY.shared(256), None);
        assert_eq!(POLICY.shared(257), Some(256), "not below the minimum");
        assert_eq!(Checkpoints { min_tokens: 0, ..POLICY }.shared(1), None);
        assert_eq!(Checkpoints { min_tokens: 0, ..POLICY }.shared(256), Some(128));
        assert_eq!(Checkpoints { stride: 0, min_tokens: 0, ..POLICY }.shared(7), Some(6));
    }

    #[test]
    fn only_the_shared_checkpoint_is_taken_or_else_the_whole_prompt() {
        assert_eq!(POLICY.plan(970, 0, 0), [768]);
        assert_eq!(POLICY.plan(200, 0, 0), [200]);
        assert_eq!(POLICY.plan(970, 768, 768), [0; 0], "it is there");
        assert_eq!(Checkpoints { max_records: 0, ..POLICY }.plan(970, 0, 0), [0; 0]);
    }

    #[test]
    fn prompts_that_part_leave_a_state_where_they_do() {
        assert_eq!(POLICY.plan(970, 0, 500), [500, 768]);
        assert_eq!(POLICY.plan(970, 0, 800), [768, 800]);
        assert_eq!(POLICY.plan(970, 768, 800), [0; 0], "not worth it");
        assert_eq!(POLICY.plan(970, 0, 970), [768], "nothing is left to compute");
        assert_eq!(POLICY.plan(970, 0, 100), [768], "too short");
        assert_eq!(Checkpoints { max_records: 1, ..POLICY }.plan(970, 0, 500), [768]);
    }
}
