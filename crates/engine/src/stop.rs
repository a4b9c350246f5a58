//! Stop strings over streamed text: whatever may still become a stop string is held back, so streamed text is never taken back.
//!
//! Sees output text only (a stop string in the prompt cannot fire) and knows no tokens: the result does not depend on how the
//! text was cut into pieces.

/// What one piece of text lets out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Released {
    /// Text that is final.
    pub text: String,
    /// Index of the stop string that was completed; nothing comes after it.
    pub stopped_by: Option<usize>,
}

/// Finds the stop string that is completed first, reading byte by byte; of several completed at the same byte the longest.
#[derive(Clone, Debug, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    include: bool,
    held: String,
}

impl StopMatcher {
    /// A matcher for `stops` (none of them empty); `include` leaves the stop string in the text.
    pub fn new(stops: &[String], include: bool) -> Self {
        StopMatcher { stops: stops.to_vec(), include, held: String::new() }
    }

    /// Adds text and returns what can no longer be part of a stop string.
    pub fn push(&mut self, text: &str) -> Released {
        if self.stops.is_empty() {
            return Released { text: text.to_owned(), stopped_by: None };
        }
        let searched = self.held.len();
        self.held.push_str(text);
        if let Some((start, end, index)) = self.first_completed(searched) {
            let mut out = std::mem::take(&mut self.held);
            out.truncate(if self.include { end } else { start });
            return Released { text: out, stopped_by: Some(index) };
        }
        let keep = self.longest_open_suffix();
        let out: String = self.held.drain(..self.held.len() - keep).collect();
        Released { text: out, stopped_by: None }
    }

    /// The held tail: it turned out to be no stop string, because the output ended for another reason.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// (start, end, stop index) of the match that ends first after byte `searched`; longest on ties.
    fn first_completed(&self, searched: usize) -> Option<(usize, usize, usize)> {
        let bytes = self.held.as_bytes();
        (searched + 1..=bytes.len()).find_map(|end| {
            let longest = |&(i, stop): &(usize, &String)| (stop.len(), usize::MAX - i);
            let ending_here = |(_, stop): &(usize, &String)| bytes[..end].ends_with(stop.as_bytes());
            let (index, stop) = self.stops.iter().enumerate().filter(ending_here).max_by_key(longest)?;
            Some((end - stop.len(), end, index))
        })
    }

    /// Bytes at the end of `held` that are a proper prefix of some stop string.
    fn longest_open_suffix(&self) -> usize {
        let bytes = self.held.as_bytes();
        let longest_stop = self.stops.iter().map(String::len).max().unwrap_or(0);
        let most = bytes.len().min(longest_stop.saturating_sub(1));
        let open = |len: &usize| {
            let suffix = &bytes[bytes.len() - len..];
            self.stops.iter().any(|stop| stop.len() > *len && stop.as_bytes().starts_with(suffix))
        };
        (1..=most).rev().find(open).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], include: bool, pieces: &[&str]) -> (String, Option<usize>) {
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let mut matcher = StopMatcher::new(&stops, include);
        let mut out = String::new();
        for piece in pieces {
            let released = matcher.push(piece);
            out += &released.text;
            if released.stopped_by.is_some() {
                return (out, released.stopped_by);
            }
        }
        out += &matcher.flush();
        (out, None)
    }

    const FOX: [&str; 3] = ["The quick br", "own", " fox jumps"];

    #[test]
    fn a_stop_string_across_pieces_leaves_none_of_itself() {
        assert_eq!(run(&["own fox"], false, &FOX), ("The quick br".into(), Some(0)));
        assert_eq!(run(&["own fox"], true, &FOX), ("The quick brown fox".into(), Some(0)));
    }

    #[test]
    fn a_near_miss_gives_the_whole_text_with_its_tail() {
        assert_eq!(run(&["own cat"], false, &FOX), ("The quick brown fox jumps".into(), None));
        assert_eq!(run(&["jumps over"], false, &FOX), ("The quick brown fox jumps".into(), None));
    }

    #[test]
    fn the_earliest_of_overlapping_stops_wins() {
        assert_eq!(run(&["fox jumps", "own fox"], false, &FOX), ("The quick br".into(), Some(1)));
        assert_eq!(run(&["fox", "own fox"], false, &FOX), ("The quick br".into(), Some(1)));
        assert_eq!(run(&["x", "x"], false, &FOX), ("The quick brown fo".into(), Some(0)));
    }

    #[test]
    fn possible_prefixes_are_held_back_and_nothing_else() {
        let mut matcher = StopMatcher::new(&["aab".into(), "é!".into()], false);
        assert_eq!(matcher.push("xaa").text, "x");
        assert_eq!(matcher.push("a").text, "a");
        assert_eq!(matcher.push("cé").text, "aac");
        assert_eq!(matcher.push("é").text, "é");
        assert_eq!(matcher.flush(), "é");
    }

    #[test]
    fn the_result_does_not_depend_on_how_the_text_is_cut() {
        let text = "ab abc aéabab caabcéd eabé";
        let stops = ["bab c", "abcé", "éd e", "zzz"];
        let chars: Vec<String> = text.chars().map(String::from).collect();
        for n in 1..=stops.len() {
            let whole = run(&stops[stops.len() - n..], false, &[text]);
            for width in 1..chars.len() {
                let pieces: Vec<String> = chars.chunks(width).map(|c| c.concat()).collect();
                let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
                assert_eq!(run(&stops[stops.len() - n..], false, &pieces), whole, "width {width}");
            }
        }
    }
}
