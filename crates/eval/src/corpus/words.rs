//! The words that tasks and prose are made of: own lists, lower case, no word twice within a list. What they are joined into is elsewhere.

use std::sync::OnceLock;

/// Splits a list once.
fn list(cell: &'static OnceLock<Vec<&'static str>>, text: &'static str) -> &'static [&'static str] {
    cell.get_or_init(|| text.split_whitespace().collect())
}

macro_rules! lists {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => {
        $($(#[$doc])*
        pub fn $name() -> &'static [&'static str] {
            static CELL: OnceLock<Vec<&'static str>> = OnceLock::new();
            list(&CELL, $text)
        })*
    };
}

lists! {
    /// Things one can point at.
    nouns = "acorn anchor anvil apron arch arrow ash attic axle badge badger bakery ballad balloon banjo banner barge barley barn barrel
        basin basket beacon beaker beam beaver beetle bell bellows bench berry blanket bonnet book boulder bowl bracket bramble branch
        brass bread brewery brick bridge broom brush bucket buckle bugle bundle butter button cabin cable candle canoe canvas canyon
        carpet cart castle cedar cellar chain chair chalk chapel charcoal chart chest chimney chisel cider cinder clam clay cliff
        cloak clock cloth clover coal cobble coffee coin comb comet compass copper coral cord cork corner cottage cotton cradle crane
        crater creek cricket crown crystal cup cupboard curtain cushion dagger dairy daisy dam desk dial diary dice ditch dock donkey
        door dove drawer drum dune eagle easel echo eel elbow elm ember engine envelope fabric falcon farm feather fence fern ferry
        fiddle field fig fir flag flask fleece flint flour flute foam fog forge fork fortress fountain fox frame frost furnace gallery
        garden garlic garnet gate geyser ginger girdle glacier glass glove goat goblet goose gorge grain granary granite grape gravel
        grove guitar gull hammer hammock harbor harness harp harvest hatch hawk hay hazel hedge helmet hen heron hill hinge hive
        honey hook horn hornet horse hull inkwell inlet iron island ivory ivy jacket jar jasmine jelly jetty jewel jug juniper kayak
        kennel kettle key kiln kite kitten knapsack knot ladder ladle lagoon lake lamp lantern lark latch lattice lava lavender leaf
        ledge lemon lens lever library lichen lily lime linen lion lizard llama lobster locket locomotive lodge log loom lute lynx
        magnet mallet manor mantle map maple marble market marsh mast mattress meadow melon mill mine mirror mitten moat molasses
        monument moss moth motor mound mountain mug mule mushroom mussel napkin needle nest net nettle notebook nutmeg oak oar oasis
        oats olive onion orbit orchard organ otter oven owl oyster paddle painting pan panther paper parcel parrot parsley pasture
        path pavement peach pear pebble pelican pencil pendulum pepper pewter piano pier pigeon pillar pillow pine pipe pitcher
        planet plank plate plough plum pocket pond poppy porch porcelain portrait pot potato pottery prairie prism pulley pump
        pumpkin puppet quarry quilt quiver rabbit radish raft railway rain raisin rake ranch raven reef reel ribbon ridge river
        rivet road robin rocket roof rope rose rudder rug saddle sail salmon salt sand sapphire saucer saw scarf school scissors
        screw scroll shawl shed sheep shell shield shovel shrine shutter sickle sieve signal silk silver skate sketch slate sled
        sleigh smoke snail snow soap sparrow spice spider spindle spire sponge spoon spring spruce squirrel stable staircase statue
        steam steeple stirrup stone stool stove straw stream string sugar sundial swallow swan swing sword table tailor tapestry tar
        teapot telescope temple tent thicket thimble thistle thread throne tide tile timber tinder toad tool torch tower town track
        trail train tray trellis trough trout trumpet trunk tulip tunnel turbine turnip turtle twig umbrella urn valley valve vase
        vault velvet veranda vessel village vine vineyard vinegar violin wagon wall walnut wardrobe warehouse wasp watch waterfall
        wave wax weasel web well whale wharf wheat wheel whistle willow windmill window wing wire wolf wool workshop wreath wrench
        yarn yoke zinc";

    /// How a thing is.
    adjectives = "able abrupt absent adept aged agile alert amber ample ancient ardent arid ashen attentive austere azure bald
        barren bashful bitter blank bleak blithe blunt bold brave breezy brief bright brisk brittle broad bronze bulky burly busy
        calm candid careful careless cautious charming cheerful chilly civil clean clear clever cloudy clumsy coarse cold common
        compact complete constant cool costly cozy crafty cramped crimson crisp crooked crude cunning curious curly damp dapper
        daring dark dear decent deep deft delicate dense dim diligent distant divine docile drowsy dry dull dusty eager early earnest
        eastern easy elegant eloquent eminent empty enormous even exact faded faint fair faithful famous fancy fast fearless feeble
        fertile festive fierce fine firm flat fleet flimsy fluent fond foreign formal fragile fragrant frail frank free fresh friendly
        frosty frugal full gallant gaunt gentle genuine giant gifted glad gleaming gloomy glossy golden graceful grand grave green
        grim gritty hale handy happy hardy harsh hasty hazy heavy helpful hidden hollow homely honest hopeful humble humid hungry
        icy ideal idle immense inland inner jaunty jolly jovial keen kind large late lavish lazy lean level light likely lively lofty
        lonely long loose lost loud loyal lucid lucky lush mellow mild mighty misty modest moist mossy muddy murky narrow native neat
        new nimble noble noisy northern novel obscure odd open orderly ornate oval pale patient peaceful placid plain pleasant polite
        polished precise pretty prime prompt proper proud prudent pure purple quaint quick quiet radiant rapid rare ready regal remote
        rich rigid ripe robust rough round royal rugged rural rustic rusty sacred salty scarlet secret secure sedate serene severe
        shady shallow sharp shiny short shy silent simple sincere sleek slender slow small smooth sober soft solemn solid sour southern
        sparse speedy splendid square stable stark steady steep stern stiff still stout strange strict strong sturdy subtle sudden
        sunny supple swift tacit tame tangled tart tender thick thin thorough thrifty tidy timid tiny tough tranquil trim true trusty
        upright urban useful usual vacant vague valiant vast verdant vigorous violet vital vivid wary warm wealthy weary weathered
        western whole wide wild winding windy wise witty wooden woolen worn worthy young zealous";

    /// What somebody did to something.
    verbs_past = "admired adjusted altered annoyed arranged assembled avoided balanced borrowed brought buried built calmed carried carved
        caught chose cleaned collected compared concealed copied counted covered crossed decorated defended delivered described
        designed discovered displayed divided drew dropped emptied examined exchanged explained fastened fetched filled finished
        followed forgot found gathered guarded guided hauled heated hid hired ignored improved inherited inspected invented kept
        labelled lent lifted located loaded lowered made measured mended missed mixed moved named needed noticed observed offered
        opened ordered packed painted passed photographed picked placed planned planted polished praised prepared preserved pressed
        produced protected pulled purchased pushed raised reached received recognized recommended recorded released remembered removed
        rented repaired replaced rescued restored returned reviewed rinsed salvaged saved searched secured selected shaped sheltered
        shifted showed sketched sold sorted stacked stored studied supplied supported surveyed tasted tested tied tightened touched
        traced traded treated trimmed turned unloaded used valued visited warmed washed watched weighed welcomed wrapped";

    /// What something did on its own.
    verbs_alone = "arrived awoke bent blossomed broke burned changed cracked creaked crumbled darkened decayed declined drifted
        dripped dwindled echoed endured expanded faded fell floated flourished flowed froze gleamed glittered grew groaned hardened
        hummed leaned lingered loosened melted mattered moved opened paused prospered remained rested ripened rose rotted rusted
        settled shifted shimmered shone shrank sank slid slowed smelled softened spread stayed stood stopped stretched suffered
        survived swayed thawed tilted trembled tumbled turned vanished vibrated waited wandered weakened wobbled worked";

    /// How it was done.
    adverbs = "abruptly actually almost already always anxiously badly barely bravely briefly busily calmly carefully carelessly
        cautiously cheerfully clearly cleverly closely constantly correctly daily deliberately eagerly early easily evenly eventually
        exactly faintly faithfully firmly frankly freely frequently gently gladly gracefully gradually happily hastily heavily
        honestly hourly instantly jointly kindly lately lazily lightly loosely loudly mainly merely mildly monthly mostly neatly
        nervously never often openly partly patiently perfectly plainly politely poorly precisely promptly properly proudly quickly
        quietly rarely readily recently regularly reluctantly roughly sadly safely secretly seldom separately sharply silently simply
        skilfully slightly slowly smoothly softly solemnly sometimes steadily strictly suddenly surely swiftly tenderly thoroughly
        tightly together twice usually vaguely visibly warmly weekly wisely yearly";

    /// What people do for a living.
    trades = "apprentice architect astronomer baker barber beekeeper blacksmith boatman bookbinder brewer bricklayer broker butcher
        captain carpenter cartographer chemist clerk cobbler cook cooper curator dentist diver doctor drummer editor engineer farmer
        ferryman fiddler fisherman florist forester gardener geologist glazier goldsmith grocer guard hatter herdsman historian
        hunter innkeeper jeweller joiner judge lawyer librarian locksmith mason mechanic merchant messenger midwife miller miner
        minister musician navigator nurse orchardist painter pastor pharmacist physician pilot plumber poet porter postman potter
        printer professor rancher saddler sailor sculptor secretary shepherd shipwright singer smith soldier steward student surgeon
        surveyor tanner teacher thatcher tinker trader translator trapper vintner waiter warden watchman weaver wheelwright";

    /// Given names.
    names = "Abel Ada Agnes Albert Alma Alvin Amos Anders Anita Anselm Arlo Astrid August Aurora Basil Beatrix Benno Berta Boris Bruno
        Carla Casper Cecily Clara Claude Conrad Cora Cosmo Cyrus Dagmar Daphne Della Dexter Dora Edgar Edith Edmund Elias Ellen Elmer
        Elsa Emil Enid Ernest Esther Ethel Eugene Felix Fergus Fiona Flora Floyd Frida Gideon Gilda Greta Gustav Hanna Harald Hattie
        Hector Hedda Helga Henrik Herman Hilda Hubert Hugo Ida Igor Ingrid Irma Isaac Ivan Ivo Jasper Jonas Judith Julius Karin Kaspar
        Klara Lars Laura Lena Leopold Lionel Lorna Lucius Ludwig Mabel Magnus Marcel Marta Matilda Maurice Maxine Mildred Milo Minna
        Morris Myra Nadia Nestor Nils Nora Norman Octavia Olaf Olga Oscar Otto Pascal Paula Percy Petra Philip Quentin Ralph Regina
        Roland Rosa Rufus Ruth Sabina Selma Sigrid Silas Simon Sofia Stella Sven Sylvia Tessa Theodor Thora Tobias Ulrich Ursula
        Valentin Vera Victor Viola Waldo Walter Wanda Wilbur Wilma Xaver Yvonne Zelda";

    /// Things that are thought or spoken of.
    matters = "advice affair agreement alarm ambition anger argument attempt balance bargain belief benefit blame burden business
        caution ceremony chance charity choice claim comfort complaint concern confidence courage credit custom danger debate debt
        decision defeat delay delight demand dispute distance doubt duty effort energy envy error event evidence example excuse
        experience failure faith fame fashion fault favour fear festival fortune freedom friendship gossip gratitude grief guess habit
        haste health history honour hope humour hurry idea illness imagination income injury instinct interest invitation journey joy
        judgement justice knowledge labour language laughter law leisure lesson luck luxury manner meaning memory mercy method
        misfortune mistake mood mystery notion occasion offer opinion order pain pardon patience peace permission plan pleasure poverty
        praise pride principle privilege problem profit progress promise proof protest purpose quarrel question reason refusal
        remedy reply reputation request rescue respect reward riddle risk rivalry rumour science season service shame silence skill
        sorrow speech spirit story strength struggle success surprise suspicion sympathy talent task taste temper theory thought thrift
        trade tradition treaty trouble trust truth vanity victory virtue wage warning waste wealth weather welfare wisdom wish wonder
        work worry youth";
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_word_stands_twice_in_its_list() {
        for (name, words) in [
            ("nouns", nouns()),
            ("adjectives", adjectives()),
            ("verbs_past", verbs_past()),
            ("verbs_alone", verbs_alone()),
            ("adverbs", adverbs()),
            ("trades", trades()),
            ("names", names()),
            ("matters", matters()),
        ] {
            let set: HashSet<_> = words.iter().collect();
            let twice: Vec<_> =
                words.iter().filter(|w| words.iter().filter(|x| x == w).count() > 1).collect();
            assert_eq!(set.len(), words.len(), "{name}: {twice:?}");
            assert!(words.len() >= 70, "{name}: {}", words.len());
        }
    }
}
