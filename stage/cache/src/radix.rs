//! A radix tree over token sequences: finding the longest common prefix costs the prefix, whatever else is kept.

use std::collections::BTreeMap;

use crate::Token;

/// Sequences, each with the slot of its entry.
#[derive(Debug, Default)]
pub(crate) struct Radix {
    root: Node,
}

#[derive(Debug, Default)]
struct Node {
    /// Tokens between the parent and this node; none at the root only.
    edge: Vec<Token>,
    slot: Option<u16>,
    /// By the first token of their edges.
    children: BTreeMap<Token, Node>,
}

/// How far a sequence leads into a tree.
struct Walk<'a> {
    /// Nodes passed, with their depths in tokens, from the root on.
    nodes: Vec<(usize, &'a Node)>,
    /// A node whose edge the sequence leaves, or ends in, half-way.
    half: Option<&'a Node>,
    /// Tokens that the sequence has in common with any kept one.
    common: usize,
}

impl Radix {
    /// Whether nothing is kept.
    pub(crate) fn is_empty(&self) -> bool {
        self.root.slot.is_none() && self.root.children.is_empty()
    }

    /// Notes `slot` for `tokens`; gives the slot noted before.
    pub(crate) fn insert(&mut self, mut tokens: &[Token], slot: u16) -> Option<u16> {
        let mut node = &mut self.root;
        while let Some(&first) = tokens.first() {
            let child = node.children.entry(first).or_insert_with(|| Node { edge: tokens.to_vec(), ..Node::default() });
            let n = common(&child.edge, tokens);
            if n < child.edge.len() {
                child.split(n);
            }
            tokens = &tokens[n..];
            node = child;
        }
        node.slot.replace(slot)
    }

    /// Forgets `tokens`; gives their slot.
    pub(crate) fn remove(&mut self, tokens: &[Token]) -> Option<u16> {
        self.root.remove(tokens)
    }

    /// The slot of exactly `tokens`.
    pub(crate) fn get(&self, tokens: &[Token]) -> Option<u16> {
        let walk = self.walk(tokens);
        walk.nodes.last().filter(|(depth, _)| *depth == tokens.len()).and_then(|(_, node)| node.slot)
    }

    /// Tokens that `tokens` has in common with any kept sequence.
    pub(crate) fn common(&self, tokens: &[Token]) -> usize {
        self.walk(tokens).common
    }

    /// Kept sequences that `tokens` begins with: length and slot, longest first.
    pub(crate) fn prefixes(&self, tokens: &[Token]) -> impl Iterator<Item = (usize, u16)> {
        self.walk(tokens).nodes.into_iter().rev().filter_map(|(depth, node)| Some((depth, node.slot?)))
    }

    /// Kept sequences by the tokens that they have in common with `tokens`, most first: that number and the slot, at most
    /// `most` of them.
    pub(crate) fn sharing(&self, tokens: &[Token], most: usize) -> Vec<(usize, u16)> {
        let walk = self.walk(tokens);
        let mut found = Vec::new();
        if let Some(half) = walk.half {
            half.collect(walk.common, None, most, &mut found);
        }
        let mut below = walk.half;
        for (depth, node) in walk.nodes.into_iter().rev() {
            node.collect(depth, below, most, &mut found);
            below = Some(node);
        }
        found
    }

    fn walk(&self, tokens: &[Token]) -> Walk<'_> {
        let mut walk = Walk { nodes: vec![(0, &self.root)], half: None, common: 0 };
        let mut node = &self.root;
        while let Some(child) = tokens.get(walk.common).and_then(|t| node.children.get(t)) {
            let n = common(&child.edge, &tokens[walk.common..]);
            walk.common += n;
            if n < child.edge.len() {
                walk.half = Some(child);
                break;
            }
            walk.nodes.push((walk.common, child));
            node = child;
        }
        walk
    }
}

impl Node {
    /// Puts a node in after `n` tokens of the edge.
    fn split(&mut self, n: usize) {
        let lower =
            Self { edge: self.edge.split_off(n), slot: self.slot.take(), children: std::mem::take(&mut self.children) };
        self.adopt(lower);
    }

    fn adopt(&mut self, child: Self) {
        if let Some(&first) = child.edge.first() {
            self.children.insert(first, child);
        }
    }

    fn remove(&mut self, tokens: &[Token]) -> Option<u16> {
        let Some(first) = tokens.first() else { return self.slot.take() };
        let child = self.children.get_mut(first)?;
        let rest = tokens.strip_prefix(child.edge.as_slice())?;
        let gone = child.remove(rest);
        if child.slot.is_none() && child.children.len() < 2 {
            // Nothing ends or parts there any more.
            let child = self.children.remove(first)?;
            if let Some((_, mut only)) = child.children.into_iter().next() {
                only.edge.splice(0..0, child.edge);
                self.adopt(only);
            }
        }
        gone
    }

    /// Appends slots of this node and what is below it, without `but` and below, until there are `most`.
    fn collect(&self, depth: usize, but: Option<&Self>, most: usize, found: &mut Vec<(usize, u16)>) {
        if found.len() >= most {
            return;
        }
        found.extend(self.slot.map(|slot| (depth, slot)));
        for child in self.children.values().filter(|c| !but.is_some_and(|b| std::ptr::eq(b, *c))) {
            child.collect(depth, None, most, found);
        }
    }
}

/// Length of the common prefix.
fn common(a: &[Token], b: &[Token]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    impl Node {
        /// No node is there for nothing.
        fn check(&self, root: bool) {
            assert!(root || (!self.edge.is_empty() && (self.slot.is_some() || self.children.len() > 1)));
            for (first, child) in &self.children {
                assert_eq!(Some(first), child.edge.first());
                child.check(false);
            }
        }
    }

    proptest! {
        /// Against a list.
        #[test]
        fn a_tree_knows_what_a_list_knows(
            acts in prop::collection::vec((prop::collection::vec(0..3i32, 0..9), 0..4u8), 1..120),
        ) {
            let mut tree = Radix::default();
            let mut list: Vec<(Vec<Token>, u16)> = Vec::new();
            for (i, (tokens, act)) in (0..).zip(acts) {
                let at = list.iter().position(|(t, _)| *t == tokens);
                match act {
                    0 => {
                        let old = at.map(|at| list.remove(at).1);
                        prop_assert_eq!(tree.insert(&tokens, i), old);
                        list.push((tokens.clone(), i));
                    }
                    1 => prop_assert_eq!(tree.remove(&tokens), at.map(|at| list.remove(at).1)),
                    _ => {}
                }
                tree.root.check(true);
                prop_assert_eq!(tree.is_empty(), list.is_empty());
                let at = list.iter().find(|(t, _)| *t == tokens).map(|(_, s)| *s);
                prop_assert_eq!(tree.get(&tokens), at);
                let mut shares: Vec<_> = list.iter().map(|(t, s)| (common(t, &tokens), *s)).collect();
                prop_assert_eq!(tree.common(&tokens), shares.iter().map(|s| s.0).max().unwrap_or(0));
                let mut prefixes: Vec<_> =
                    list.iter().filter(|(t, _)| tokens.starts_with(t)).map(|(t, s)| (t.len(), *s)).collect();
                prefixes.sort_unstable_by(|a, b| b.cmp(a));
                prop_assert_eq!(tree.prefixes(&tokens).collect::<Vec<_>>(), prefixes);
                let mut found = tree.sharing(&tokens, usize::MAX);
                prop_assert!(found.is_sorted_by_key(|f| std::cmp::Reverse(f.0)));
                let few = tree.sharing(&tokens, 2);
                prop_assert!(few.len() >= list.len().min(2) && found.starts_with(&few));
                found.sort_unstable();
                shares.sort_unstable();
                prop_assert_eq!(found, shares);
            }
        }
    }
}
