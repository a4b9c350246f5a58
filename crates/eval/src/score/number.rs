//! Numbers in answers.

/// Whole numbers that stand in a text, with their signs, in order. Digits that touch letters or decimal parts are no whole numbers.
pub fn whole_numbers(text: &str) -> Vec<i64> {
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    let mut i = 0;
    while i < bytes.len() {
        if !bytes[i].is_ascii_digit() {
            i += 1;
            continue;
        }
        let start = i;
        while i < bytes.len() && bytes[i].is_ascii_digit() {
            i += 1;
        }
        let touches = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
        let before = start.checked_sub(1).map(|p| bytes[p]);
        let fraction = bytes.get(i) == Some(&b'.') && bytes.get(i + 1).is_some_and(u8::is_ascii_digit);
        if before.is_some_and(|b| touches(b) || b == b'.')
            || bytes.get(i).is_some_and(|&b| touches(b))
            || fraction
        {
            while i < bytes.len() && (touches(bytes[i]) || bytes[i] == b'.') {
                i += 1;
            }
            continue;
        }
        let minus = before == Some(b'-') && (start < 2 || !bytes[start - 2].is_ascii_alphanumeric());
        if let Ok(n) = text[start..i].parse::<i64>() {
            found.push(if minus { -n } else { n });
        }
    }
    found
}

/// 1 for the right number, falling with the relative error to 0.
pub fn closeness(said: i64, gold: i64) -> f64 {
    (1.0 - (said as f64 - gold as f64).abs() / (gold as f64).abs().max(1.0)).max(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_alone() {
        assert_eq!(whole_numbers("It is -7, not 12 or x3 or 4.5; 8."), [-7, 12, 8]);
        assert_eq!(whole_numbers("a-7 99999999999999999999"), [7]);
        assert_eq!(closeness(90, 100), 0.9);
        assert_eq!(closeness(-500, 100), 0.0);
    }
}
